// Cells of the KV cache: every rule of kv_cells.hpp.
#include "kv_helpers.hpp"
#include "runtime/kv_cache/kv_cells.hpp"

using namespace kv_test;

TEST(seq_set_is_sorted_without_duplicates) {
    SeqSet set;
    CHECK(set.empty());
    CHECK(!set.contains(-1));
    CHECK(set.insert(5));
    CHECK(set.insert(int64_t(1) << 60));
    CHECK(set.insert(0));
    CHECK(!set.insert(5));
    CHECK_EQ(set.size(), 3);
    CHECK_EQ(set[0], 0);
    CHECK_EQ(set[1], 5);
    CHECK_EQ(set[2], int64_t(1) << 60);
    CHECK(set.erase(0));
    CHECK(!set.erase(0));
    CHECK_EQ(set[0], 5);
    CHECK(set.erase(int64_t(1) << 60));
    CHECK(set.erase(5));
    CHECK(set.empty());
    CHECK(set.insert(7));
    CHECK_EQ(set.size(), 1);
}

TEST(cells_check_their_preconditions) {
    KvCells cells(70);
    const int64_t seqs[] = {3, 1, 3};
    cells.occupy(69, 4, seqs, 3);
    CHECK_EQ(cells.seqs(69).size(), 2);
    CHECK_EQ(cells.used(), 1);
    CHECK_THROWS(cells.occupy(69, 5, seqs, 1), "internal error", "69", "in use");
    CHECK_THROWS(cells.occupy(70, 5, seqs, 1), "cell 70 is outside [0, 70)");
    CHECK_THROWS(cells.occupy(-1, 5, seqs, 1), "cell -1");
    CHECK_THROWS(cells.occupy(0, -1, seqs, 1), "position -1");
    CHECK_THROWS(cells.occupy(0, 1, seqs, 0), "no sequence");
    const int64_t negative = -4;
    CHECK_THROWS(cells.occupy(0, 1, &negative, 1), "sequence -4");
    CHECK_THROWS(cells.share(0, 1), "cell 0 is free");
    CHECK_THROWS(cells.share(69, -1), "sequence -1");
    CHECK_THROWS(cells.vacate(3), "cell 3 is free");
    CHECK_THROWS(cells.pos(3), "cell 3 is free");
    CHECK_THROWS(cells.unshare(69, 9), "sequence 9");
    CHECK_THROWS(cells.move(1, 0, kFar, -5), "cannot move by -5");
    CHECK_EQ(cells.used(), 1);
    CHECK_EQ(cells.pos_max(3), 4);
}

TEST(next_free_crosses_words_and_ends_at_the_size) {
    KvCells cells(130);
    const int64_t seq = 0;
    for (int32_t cell = 0; cell < 130; ++cell) {
        if (cell != 64 && cell != 127) {
            cells.occupy(cell, cell, &seq, 1);
        }
    }
    CHECK_EQ(cells.next_free(0), 64);
    CHECK_EQ(cells.next_free(64), 64);
    CHECK_EQ(cells.next_free(65), 127);
    CHECK_EQ(cells.next_free(128), 130);
    CHECK_EQ(cells.next_free(130), 130);
}

TEST(position_bounds_count_cells_at_the_same_position) {
    KvCells cells(8);
    const int64_t seq = 2;
    cells.occupy(5, 7, &seq, 1);
    cells.occupy(1, 7, &seq, 1);
    cells.occupy(3, 2, &seq, 1);
    CHECK_EQ(cells.pos_min(2), 2);
    CHECK_EQ(cells.pos_max(2), 7);
    CHECK_EQ(cells.entries(2)[1].cell, 1);
    CHECK_EQ(cells.entries(2)[2].cell, 5);
    cells.vacate(5);
    CHECK_EQ(cells.pos_max(2), 7);
    cells.vacate(1);
    CHECK_EQ(cells.pos_max(2), 2);
    cells.vacate(3);
    CHECK_EQ(cells.pos_max(2), -1);
    CHECK_EQ(cells.n_sequences(), 0);
}
