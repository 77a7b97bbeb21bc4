// KV metadata: every rule of kv_cells.hpp, kv_cache.hpp and block_layout.hpp, and long random runs
// against a naive model.
#include "check.hpp"
#include "runtime/kv_cache/block_layout.hpp"
#include "runtime/kv_cache/kv_cache.hpp"

#include <algorithm>
#include <limits>
#include <map>
#include <random>
#include <set>

using namespace llaisys::runtime;

namespace {

constexpr int64_t kFar = std::numeric_limits<int64_t>::max();

// Tokens with their sequences; owns what an Ubatch points to.
struct Batch {
    std::vector<int64_t> positions, seq_ids;
    std::vector<int32_t> offsets{0};

    Batch &add(int64_t pos, std::vector<int64_t> seqs) {
        positions.push_back(pos);
        seq_ids.insert(seq_ids.end(), seqs.begin(), seqs.end());
        offsets.push_back(int32_t(seq_ids.size()));
        return *this;
    }
    Ubatch view() const {
        return {int32_t(positions.size()), positions.data(), offsets.data(), seq_ids.data()};
    }
};

Batch run_of(int64_t seq, int64_t p0, int64_t p1) {
    Batch batch;
    for (int64_t p = p0; p < p1; ++p) {
        batch.add(p, {seq});
    }
    return batch;
}

// prepare + apply of one ubatch.
KvStatus put(KvCache &cache, const Batch &batch, std::vector<SlotPlan> *plans = nullptr) {
    std::vector<SlotPlan> own;
    plans = plans == nullptr ? &own : plans;
    const Ubatch ubatch = batch.view();
    const KvStatus status = cache.prepare(&ubatch, 1, plans);
    if (status == LLAISYS_KV_OK) {
        cache.apply_ubatch((*plans)[0], ubatch);
        cache.check_integrity();
    }
    return status;
}

// Everything that can be seen of a cache, pending shifts aside.
std::string state_of(const KvCache &cache) {
    const KvCacheStats stats = cache.stats();
    std::string text = cache.dump() + llaisys::text(stats.capacity, ' ', stats.used, ' ',
                                                    stats.peak, ' ', stats.n_sequences, " heads");
    for (int32_t s = 0; s < cache.n_streams(); ++s) {
        text += llaisys::text(' ', cache.head(s));
    }
    return text;
}

std::string listed(const KvCache &cache, std::vector<int64_t> seqs) {
    std::vector<int32_t> slots;
    std::vector<int64_t> positions;
    cache.list_slots(seqs.data(), int32_t(seqs.size()), &slots, &positions);
    std::string text;
    for (size_t i = 0; i < slots.size(); ++i) {
        text += llaisys::text(i == 0 ? "" : " ", positions[i], "@", slots[i]);
    }
    return text;
}

std::string joined(const std::vector<int32_t> &values) {
    std::string text;
    for (const int32_t value : values) {
        text += llaisys::text(text.empty() ? "" : " ", value);
    }
    return text;
}

} // namespace

// -- KvCells -----------------------------------------------------------------------------------

TEST(seq_set_is_sorted_and_has_no_doubles) {
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
    CHECK_THROWS(cells.occupy(69, 5, seqs, 1), "internal error", "69", "taken");
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

TEST(position_ends_count_cells_at_the_same_position) {
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

// -- A step ------------------------------------------------------------------------------------

TEST(construction_refuses_bad_sizes) {
    CHECK_THROWS(KvCache(0, 4, 4), "streams", "0");
    CHECK_THROWS(KvCache(1, 0, 4), "cells", "0");
    CHECK_THROWS(KvCache(1, 4, 0), "max_positions", "0");
    CHECK_THROWS(KvCache(1 << 16, 1 << 16, 4), "2147483647", "4294967296");
}

TEST(slots_are_taken_from_the_head_round_the_end) {
    KvCache cache(1, 4, 100);
    std::vector<SlotPlan> plans;
    CHECK_EQ(put(cache, run_of(0, 0, 3), &plans), LLAISYS_KV_OK);
    CHECK_EQ(joined(plans[0].slots), "0 1 2");
    CHECK_EQ(cache.head(0), 3);
    CHECK_EQ(cache.seq_rm(0, 0, 2), LLAISYS_KV_OK);
    CHECK_EQ(put(cache, run_of(1, 0, 2), &plans), LLAISYS_KV_OK);
    CHECK_EQ(joined(plans[0].slots), "3 0");
    CHECK_EQ(put(cache, run_of(1, 2, 3), &plans), LLAISYS_KV_OK);
    CHECK_EQ(joined(plans[0].slots), "1");
    CHECK_EQ(put(cache, run_of(1, 3, 4), &plans), LLAISYS_KV_OOM_SLOT);

    std::vector<int32_t> slots{9};
    int32_t head = -1;
    CHECK_EQ(cache.find_slot(0, 1, &slots, &head), LLAISYS_KV_OOM_SLOT);
    CHECK_EQ(joined(slots), "9");
    CHECK_EQ(cache.seq_rm(1, 0, 1), LLAISYS_KV_OK);
    CHECK_EQ(cache.find_slot(0, 1, &slots, &head), LLAISYS_KV_OK);
    CHECK_EQ(joined(slots), "9 3");
    CHECK_EQ(head, 0);
}

TEST(prepare_plans_all_ubatches_or_none_and_changes_nothing) {
    KvCache cache(1, 5, 100);
    CHECK_EQ(put(cache, run_of(7, 0, 1)), LLAISYS_KV_OK);
    const std::string before = state_of(cache);
    const Batch a = run_of(1, 0, 2), b = run_of(2, 0, 2), c = run_of(3, 0, 1);
    const Ubatch all[] = {a.view(), b.view(), c.view()};
    std::vector<SlotPlan> plans;
    CHECK_EQ(cache.prepare(all, 3, &plans), LLAISYS_KV_OOM_SLOT);
    CHECK_EQ(state_of(cache), before);
    CHECK_EQ(cache.prepare(all, 2, &plans), LLAISYS_KV_OK);
    CHECK_EQ(state_of(cache), before);
    CHECK_EQ(joined(plans[0].slots), "1 2");
    CHECK_EQ(joined(plans[1].slots), "3 4");
}

TEST(prepare_checks_tokens_in_order_before_room) {
    KvCache cache(2, 2, 10);
    CHECK_EQ(cache.set_stream(5, 1), LLAISYS_KV_OK);
    CHECK_EQ(put(cache, Batch().add(0, {-1})), LLAISYS_KV_INVALID_SEQ);
    CHECK_EQ(put(cache, Batch().add(0, {0, -1})), LLAISYS_KV_INVALID_SEQ);
    CHECK_EQ(put(cache, Batch().add(0, {})), LLAISYS_KV_INVALID_SEQ);
    CHECK_EQ(put(cache, Batch().add(0, {0, 5})), LLAISYS_KV_INVALID_SEQ); // two streams
    CHECK_EQ(put(cache, Batch().add(-1, {0})), LLAISYS_KV_INVALID_POS);
    CHECK_EQ(put(cache, Batch().add(10, {0})), LLAISYS_KV_INVALID_POS);
    CHECK_EQ(put(cache, Batch().add(-1, {-1})), LLAISYS_KV_INVALID_SEQ);
    CHECK_EQ(put(cache, Batch().add(10, {0}).add(0, {-1})), LLAISYS_KV_INVALID_POS);
    CHECK_EQ(put(cache, run_of(0, 0, 3).add(0, {-1})), LLAISYS_KV_INVALID_SEQ);
    CHECK_EQ(put(cache, run_of(0, 0, 3)), LLAISYS_KV_OOM_SLOT);
    CHECK_EQ(cache.stats().used, 0);
    CHECK_EQ(put(cache, run_of(0, 8, 10)), LLAISYS_KV_OK);
    CHECK_EQ(put(cache, run_of(5, 8, 10)), LLAISYS_KV_OK); // the other stream has room of its own
}

TEST(rollback_restores_everything) {
    KvCache cache(2, 8, 100);
    CHECK_EQ(cache.set_stream(4, 1), LLAISYS_KV_OK);
    CHECK_EQ(put(cache, run_of(0, 0, 3).add(0, {4})), LLAISYS_KV_OK);
    CHECK_EQ(cache.seq_cp(1, 0, 0, 2), LLAISYS_KV_OK);
    CHECK_EQ(cache.seq_rm(0, 1, 2), LLAISYS_KV_OK);
    const std::string before = state_of(cache);
    const Batch a = run_of(1, 2, 4).add(1, {4}), b = run_of(9, 0, 2).add(5, {0, 1});
    const Ubatch ubatches[] = {a.view(), b.view()};
    std::vector<SlotPlan> plans;
    CHECK_EQ(cache.prepare(ubatches, 2, &plans), LLAISYS_KV_OK);
    CHECK_THROWS(cache.apply_ubatch(plans[1], ubatches[1]), "internal error", "changed");
    CHECK_EQ(state_of(cache), before);
    cache.apply_ubatch(plans[0], ubatches[0]);
    const std::string between = state_of(cache);
    cache.apply_ubatch(plans[1], ubatches[1]);
    CHECK_EQ(cache.stats().used, 10);
    CHECK_EQ(cache.seq_pos_max(9), 1);
    CHECK_THROWS(cache.rollback_ubatch(plans[0], ubatches[0]), "not the last one");
    cache.rollback_ubatch(plans[1], ubatches[1]);
    CHECK_EQ(state_of(cache), between);
    cache.rollback_ubatch(plans[0], ubatches[0]);
    cache.check_integrity();
    CHECK_EQ(state_of(cache), before);
    CHECK_THROWS(cache.rollback_ubatch(plans[0], ubatches[0]), "not the last one");
    cache.apply_ubatch(plans[0], ubatches[0]); // a plan survives its rollback
    CHECK_EQ(state_of(cache), between);
}

TEST(a_plan_made_before_a_change_is_refused) {
    KvCache cache(1, 4, 100);
    CHECK_EQ(put(cache, run_of(0, 0, 2)), LLAISYS_KV_OK);
    const Batch batch = run_of(0, 2, 3);
    const Ubatch ubatch = batch.view();
    std::vector<SlotPlan> plans;
    CHECK_EQ(cache.prepare(&ubatch, 1, &plans), LLAISYS_KV_OK);
    CHECK_EQ(cache.seq_rm(0, 0, 1), LLAISYS_KV_OK);
    CHECK_THROWS(cache.apply_ubatch(plans[0], ubatch), "changed since the plan");
    CHECK_EQ(cache.stats().used, 1);
}

TEST(dump_prints_cells_and_the_tokens_of_the_last_step) {
    KvCache cache(1, 8, 100);
    const Batch a = Batch().add(0, {2, 0}).add(1, {0}), b = Batch().add(2, {0});
    const Ubatch ubatches[] = {a.view(), b.view()};
    std::vector<SlotPlan> plans;
    CHECK_EQ(cache.prepare(ubatches, 2, &plans), LLAISYS_KV_OK);
    cache.apply_ubatch(plans[0], ubatches[0]);
    cache.apply_ubatch(plans[1], ubatches[1]);
    CHECK_EQ(cache.dump(), "cell[0] = {seq_ids=[0, 2], pos=0, used=1}\n"
                           "cell[1] = {seq_ids=[0], pos=1, used=1}\n"
                           "cell[2] = {seq_ids=[0], pos=2, used=1}\n"
                           "token[0] -> cell[0]\ntoken[1] -> cell[1]\ntoken[2] -> cell[2]\n");
    CHECK_EQ(put(cache, Batch().add(1, {2})), LLAISYS_KV_OK);
    CHECK(cache.dump().find("token[0] -> cell[3]\n") != std::string::npos);
    CHECK(cache.dump().find("token[1]") == std::string::npos);
}

TEST(peak_is_kept_and_rolled_back_steps_do_not_count) {
    KvCache cache(1, 8, 100);
    CHECK_EQ(put(cache, run_of(0, 0, 5)), LLAISYS_KV_OK);
    CHECK_EQ(cache.seq_rm(0, 1, -1), LLAISYS_KV_OK);
    CHECK_EQ(cache.stats().used, 1);
    CHECK_EQ(cache.stats().peak, 5);
    std::vector<SlotPlan> plans;
    const Batch batch = run_of(1, 0, 7);
    CHECK_EQ(put(cache, batch, &plans), LLAISYS_KV_OK);
    CHECK_EQ(cache.stats().peak, 8);
    cache.rollback_ubatch(plans[0], batch.view());
    CHECK_EQ(cache.stats().peak, 5);
    CHECK_EQ(cache.stats().capacity, 8);
    CHECK_EQ(cache.stats().n_sequences, 1);
}

// -- Sequences ---------------------------------------------------------------------------------

TEST(seq_calls_check_in_the_documented_order) {
    KvCache cache(1, 8, 10);
    CHECK_EQ(put(cache, run_of(0, 2, 5)), LLAISYS_KV_OK);
    const std::string before = state_of(cache);
    // 1. the id comes before the range
    CHECK_EQ(cache.seq_cp(-1, 0, 5, 5), LLAISYS_KV_INVALID_SEQ);
    CHECK_EQ(cache.seq_cp(1, -1, 5, 5), LLAISYS_KV_INVALID_SEQ);
    CHECK_EQ(cache.seq_rm(-1, 5, 5), LLAISYS_KV_INVALID_SEQ);
    CHECK_EQ(cache.seq_add(-1, 5, 5, 1), LLAISYS_KV_INVALID_SEQ);
    CHECK_EQ(cache.seq_keep(-1), LLAISYS_KV_INVALID_SEQ);
    // 2. the range comes before the cells
    CHECK_EQ(cache.seq_cp(1, 7, 5, 5), LLAISYS_KV_EMPTY_RANGE);
    CHECK_EQ(cache.seq_rm(7, 5, 4), LLAISYS_KV_EMPTY_RANGE);
    CHECK_EQ(cache.seq_add(7, -1, 0, 100), LLAISYS_KV_EMPTY_RANGE);
    // 3. a sequence without cells
    CHECK_EQ(cache.seq_cp(0, 7, 0, -1), LLAISYS_KV_INVALID_SEQ);
    CHECK_EQ(cache.seq_rm(7, -1, -1), LLAISYS_KV_INVALID_SEQ);
    CHECK_EQ(cache.seq_add(7, 0, 1, -5), LLAISYS_KV_INVALID_SEQ);
    CHECK_EQ(cache.seq_keep(7), LLAISYS_KV_INVALID_SEQ);
    // 4. no hit
    CHECK_EQ(cache.seq_cp(1, 0, 0, 2), LLAISYS_KV_EMPTY_RANGE);
    CHECK_EQ(cache.seq_rm(0, 5, -1), LLAISYS_KV_EMPTY_RANGE);
    CHECK_EQ(cache.seq_add(0, 0, 2, -100), LLAISYS_KV_EMPTY_RANGE);
    // 5. positions
    CHECK_EQ(cache.seq_add(0, -1, -1, -3), LLAISYS_KV_INVALID_POS);
    CHECK_EQ(cache.seq_add(0, 0, kFar, 6), LLAISYS_KV_INVALID_POS);
    CHECK_EQ(cache.seq_add(0, 0, -1, kFar), LLAISYS_KV_INVALID_POS);
    CHECK_EQ(cache.seq_add(0, 0, -1, -kFar - 1), LLAISYS_KV_INVALID_POS);
    CHECK_EQ(state_of(cache), before);
    CHECK(!cache.needs_update());
    CHECK_EQ(cache.seq_pos_min(7), -1);
    CHECK_EQ(cache.seq_pos_max(-3), -1);
}

TEST(seq_cp_shares_cells_of_the_same_stream) {
    KvCache cache(1, 8, 10);
    CHECK_EQ(put(cache, run_of(0, 0, 4)), LLAISYS_KV_OK);
    CHECK_EQ(cache.seq_cp(3, 0, 1, 3), LLAISYS_KV_OK);
    CHECK_EQ(listed(cache, {3}), "1@1 2@2");
    CHECK_EQ(cache.seq_cp(3, 0, 0, -1), LLAISYS_KV_OK); // some are shared already
    CHECK_EQ(listed(cache, {3}), "0@0 1@1 2@2 3@3");
    const std::string before = state_of(cache);
    CHECK_EQ(cache.seq_cp(0, 0, -1, -1), LLAISYS_KV_OK);
    CHECK_EQ(state_of(cache), before);
    CHECK_EQ(cache.stats().used, 4);
    CHECK_EQ(cache.stats().n_sequences, 2);
    CHECK(!cache.needs_update());
    cache.check_integrity();
}

TEST(seq_rm_frees_only_cells_without_a_sequence) {
    KvCache cache(1, 4, 10);
    CHECK_EQ(put(cache, run_of(0, 0, 4)), LLAISYS_KV_OK);
    CHECK_EQ(cache.seq_cp(1, 0, 0, 2), LLAISYS_KV_OK);
    CHECK_EQ(cache.seq_rm(0, -1, 3), LLAISYS_KV_OK);
    CHECK_EQ(cache.stats().used, 3);
    CHECK_EQ(listed(cache, {0}), "3@3");
    CHECK_EQ(listed(cache, {1}), "0@0 1@1");
    CHECK_EQ(put(cache, run_of(0, 4, 5)), LLAISYS_KV_OK); // the freed cell is handed out again
    CHECK_EQ(listed(cache, {0}), "3@3 4@2");
    CHECK_EQ(cache.seq_rm(0, -1, -1), LLAISYS_KV_OK);
    CHECK_EQ(cache.seq_pos_max(0), -1);
    CHECK_EQ(cache.seq_rm(0, -1, -1), LLAISYS_KV_INVALID_SEQ);
}

TEST(seq_add_moves_shared_cells_for_all_and_hands_out_one_shift) {
    KvCache cache(1, 8, 20);
    CHECK_EQ(put(cache, run_of(0, 0, 4)), LLAISYS_KV_OK);
    CHECK_EQ(cache.seq_cp(1, 0, 2, 4), LLAISYS_KV_OK);
    CHECK_EQ(cache.seq_add(0, 2, -1, 0), LLAISYS_KV_OK);
    CHECK(!cache.needs_update());
    CHECK_EQ(cache.seq_add(0, 3, -1, 5), LLAISYS_KV_OK);
    CHECK_EQ(listed(cache, {1}), "2@2 8@3");
    CHECK_EQ(cache.seq_add(1, 0, -1, -2), LLAISYS_KV_OK);
    CHECK_EQ(listed(cache, {0}), "0@0 0@2 1@1 6@3"); // passed by: sorted anew
    CHECK_EQ(cache.seq_pos_max(1), 6);
    CHECK(cache.needs_update());
    KvUpdate work;
    cache.update(&work);
    CHECK_EQ(joined(work.shift_slots), "2 3");
    CHECK_EQ(work.shift_deltas[0], -2);
    CHECK_EQ(work.shift_deltas[1], 3);
    CHECK(work.copy_src.empty());
    CHECK(!cache.needs_update());
    cache.update(&work);
    CHECK(work.shift_slots.empty());
    // There and back again needs no rotation; a freed cell needs none either.
    CHECK_EQ(cache.seq_add(0, 6, -1, 1), LLAISYS_KV_OK);
    CHECK_EQ(cache.seq_add(0, 7, -1, -1), LLAISYS_KV_OK);
    CHECK_EQ(cache.seq_add(0, 1, 2, 1), LLAISYS_KV_OK);
    CHECK_EQ(cache.seq_rm(0, 2, 3), LLAISYS_KV_OK);
    cache.update(&work);
    CHECK(work.shift_slots.empty());
    cache.check_integrity();
}

TEST(seq_keep_drops_all_others_in_all_streams) {
    KvCache cache(2, 4, 20);
    CHECK_EQ(cache.set_stream(8, 1), LLAISYS_KV_OK);
    CHECK_EQ(put(cache, Batch().add(0, {0, 1}).add(1, {0}).add(1, {1}).add(0, {8})), LLAISYS_KV_OK);
    CHECK_EQ(cache.seq_keep(5), LLAISYS_KV_INVALID_SEQ);
    CHECK_EQ(cache.stats().n_sequences, 3);
    CHECK_EQ(cache.seq_keep(1), LLAISYS_KV_OK);
    CHECK_EQ(cache.stats().n_sequences, 1);
    CHECK_EQ(cache.stats().used, 2);
    CHECK_EQ(listed(cache, {1}), "0@0 1@2");
    cache.check_integrity();
}

TEST(streams_are_fixed_while_a_sequence_holds_cells) {
    KvCache cache(2, 4, 20);
    CHECK_EQ(cache.stream_of(3), 0);
    CHECK_EQ(cache.set_stream(-1, 0), LLAISYS_KV_INVALID_SEQ);
    CHECK_EQ(cache.set_stream(3, 2), LLAISYS_KV_INVALID_SEQ);
    CHECK_EQ(cache.set_stream(3, -1), LLAISYS_KV_INVALID_SEQ);
    CHECK_EQ(cache.set_stream(3, 1), LLAISYS_KV_OK);
    CHECK_EQ(put(cache, run_of(3, 0, 2)), LLAISYS_KV_OK);
    CHECK_EQ(listed(cache, {3}), "0@4 1@5");
    CHECK_EQ(cache.set_stream(3, 0), LLAISYS_KV_INVALID_SEQ);
    CHECK_EQ(cache.set_stream(3, 1), LLAISYS_KV_OK);
    CHECK_EQ(cache.seq_rm(3, -1, -1), LLAISYS_KV_OK);
    CHECK_EQ(cache.set_stream(3, 0), LLAISYS_KV_OK);
}

TEST(seq_cp_across_streams_takes_cells_and_records_copies) {
    KvCache cache(2, 4, 20);
    KvUpdate work;
    CHECK_EQ(cache.set_stream(1, 1), LLAISYS_KV_OK);
    CHECK_EQ(put(cache, run_of(0, 0, 4)), LLAISYS_KV_OK);
    CHECK_EQ(cache.seq_add(0, 2, 3, 5), LLAISYS_KV_OK);
    CHECK_EQ(cache.seq_cp(1, 0, 1, -1), LLAISYS_KV_OK);
    CHECK_EQ(listed(cache, {1}), "1@4 3@5 7@6");
    CHECK_EQ(cache.stats().peak, 7);
    const std::string before = state_of(cache);
    CHECK_EQ(cache.seq_cp(1, 0, 0, -1), LLAISYS_KV_OOM_SLOT);
    CHECK_EQ(state_of(cache), before);
    cache.update(&work);
    CHECK_EQ(joined(work.copy_src), "1 3 2");
    CHECK_EQ(joined(work.copy_dst), "4 5 6");
    CHECK_EQ(joined(work.shift_slots), "2 6"); // the copy lacks the rotation as well
    CHECK_EQ(work.shift_deltas[1], 5);
    CHECK(!cache.needs_update());
    cache.check_integrity();
}

TEST(chained_copies_are_resolved_to_where_the_bytes_are) {
    KvCache cache(3, 1, 20);
    KvUpdate work;
    CHECK_EQ(cache.set_stream(1, 1), LLAISYS_KV_OK);
    CHECK_EQ(cache.set_stream(2, 2), LLAISYS_KV_OK);
    CHECK_EQ(put(cache, run_of(0, 0, 1)), LLAISYS_KV_OK);
    CHECK_EQ(cache.seq_cp(1, 0, 0, 1), LLAISYS_KV_OK); // slot 0 -> 1
    CHECK_EQ(cache.seq_cp(2, 1, 0, 1), LLAISYS_KV_OK); // slot 1 -> 2: its bytes are still in 0
    CHECK_EQ(cache.seq_rm(0, 0, 1), LLAISYS_KV_OK);
    CHECK_EQ(cache.seq_cp(0, 2, 0, 1), LLAISYS_KV_OK); // back where it came from: no copy
    CHECK_EQ(cache.seq_rm(1, 0, 1), LLAISYS_KV_OK);    // nobody needs slot 1 any more
    cache.update(&work);
    CHECK_EQ(joined(work.copy_src), "0");
    CHECK_EQ(joined(work.copy_dst), "2");
}

TEST(list_slots_is_the_union_sorted_by_position_and_slot) {
    KvCache cache(1, 8, 20);
    CHECK_EQ(put(cache, Batch().add(3, {0}).add(0, {0, 1}).add(1, {1}).add(1, {0}).add(2, {2})),
             LLAISYS_KV_OK);
    CHECK_EQ(listed(cache, {0}), "0@1 1@3 3@0");
    CHECK_EQ(listed(cache, {1, 0, 1}), "0@1 1@2 1@3 3@0");
    CHECK_EQ(listed(cache, {5, 2}), "2@4");
    CHECK_EQ(listed(cache, {}), "");
    CHECK_EQ(listed(cache, {-1}), "");
}

// -- Random runs against a naive model ---------------------------------------------------------

namespace {

// The documented rules, written without regard for speed.
struct Naive {
    struct Cell {
        int64_t pos = -1, shift = 0;
        std::set<int64_t> seqs;
        int bytes = -1; // whose bytes are in it
    };
    int32_t n_cells;
    int64_t max_positions;
    std::vector<std::vector<Cell>> streams;
    std::vector<int32_t> heads;
    std::map<int64_t, int32_t> stream_of;
    int64_t peak = 0;

    Naive(int32_t n_streams, int32_t cells, int64_t positions)
        : n_cells(cells), max_positions(positions),
          streams(size_t(n_streams), std::vector<Cell>(size_t(cells))),
          heads(size_t(n_streams), 0) {}

    std::vector<Cell> &cells_of(int64_t seq) { return streams[size_t(stream_of[seq])]; }
    int64_t used() const {
        int64_t n = 0;
        for (const auto &stream : streams) {
            n += std::count_if(stream.begin(), stream.end(),
                               [](auto &c) { return !c.seqs.empty(); });
        }
        return n;
    }
    bool take(int32_t stream, int64_t pos, const std::set<int64_t> &seqs, int32_t *slot) {
        for (int32_t step = 0; step < n_cells; ++step) {
            const int32_t cell = (heads[size_t(stream)] + step) % n_cells;
            Cell &c = streams[size_t(stream)][size_t(cell)];
            if (c.seqs.empty()) {
                c.pos = pos;
                c.shift = 0;
                c.seqs = seqs;
                heads[size_t(stream)] = (cell + 1) % n_cells;
                *slot = stream * n_cells + cell;
                return true;
            }
        }
        return false;
    }
    KvStatus decode(const Batch &batch, std::vector<int32_t> *slots) {
        for (size_t i = 0; i < batch.positions.size(); ++i) {
            std::set<int32_t> where;
            for (int32_t s = batch.offsets[i]; s < batch.offsets[i + 1]; ++s) {
                if (batch.seq_ids[size_t(s)] < 0) {
                    return LLAISYS_KV_INVALID_SEQ;
                }
                where.insert(stream_of[batch.seq_ids[size_t(s)]]);
            }
            if (where.size() != 1) {
                return LLAISYS_KV_INVALID_SEQ;
            }
            if (batch.positions[i] < 0 || batch.positions[i] >= max_positions) {
                return LLAISYS_KV_INVALID_POS;
            }
        }
        const auto streams_before = streams;
        const auto heads_before = heads;
        for (size_t i = 0; i < batch.positions.size(); ++i) {
            const std::set<int64_t> seqs(batch.seq_ids.begin() + batch.offsets[i],
                                         batch.seq_ids.begin() + batch.offsets[i + 1]);
            int32_t slot = 0;
            if (!take(stream_of[*seqs.begin()], batch.positions[i], seqs, &slot)) {
                streams = streams_before;
                heads = heads_before;
                return LLAISYS_KV_OOM_SLOT;
            }
            slots->push_back(slot);
        }
        peak = std::max(peak, used());
        return LLAISYS_KV_OK;
    }
    // Checks 1 to 4; the hits as (pos, cell).
    KvStatus find(int64_t seq, int64_t p0, int64_t p1,
                  std::vector<std::pair<int64_t, int32_t>> *hits) {
        p0 = std::max<int64_t>(p0, 0);
        p1 = p1 < 0 ? kFar : p1;
        if (seq < 0) {
            return LLAISYS_KV_INVALID_SEQ;
        }
        if (p0 >= p1) {
            return LLAISYS_KV_EMPTY_RANGE;
        }
        bool holds = false;
        auto &cells = cells_of(seq);
        for (int32_t c = 0; c < n_cells; ++c) {
            if (cells[size_t(c)].seqs.count(seq) != 0) {
                holds = true;
                if (cells[size_t(c)].pos >= p0 && cells[size_t(c)].pos < p1) {
                    hits->push_back({cells[size_t(c)].pos, c});
                }
            }
        }
        std::sort(hits->begin(), hits->end());
        return !holds          ? LLAISYS_KV_INVALID_SEQ
               : hits->empty() ? LLAISYS_KV_EMPTY_RANGE
                               : LLAISYS_KV_OK;
    }
    KvStatus cp(int64_t dst, int64_t src, int64_t p0, int64_t p1) {
        std::vector<std::pair<int64_t, int32_t>> hits;
        if (dst < 0) {
            return LLAISYS_KV_INVALID_SEQ;
        }
        const KvStatus status = find(src, p0, p1, &hits);
        if (status != LLAISYS_KV_OK || dst == src) {
            return status;
        }
        const int32_t to = stream_of[dst];
        auto &cells = cells_of(src);
        if (to == stream_of[src]) {
            for (const auto &hit : hits) {
                cells[size_t(hit.second)].seqs.insert(dst);
            }
            return LLAISYS_KV_OK;
        }
        int64_t n_free = 0;
        for (const Cell &cell : streams[size_t(to)]) {
            n_free += cell.seqs.empty();
        }
        if (n_free < int64_t(hits.size())) {
            return LLAISYS_KV_OOM_SLOT;
        }
        for (const auto &hit : hits) {
            int32_t slot = 0;
            take(to, hit.first, {dst}, &slot);
            Cell &copy = streams[size_t(to)][size_t(slot % n_cells)];
            copy.shift = cells[size_t(hit.second)].shift;
            copy.bytes = cells[size_t(hit.second)].bytes; // the model copies at once
        }
        peak = std::max(peak, used());
        return LLAISYS_KV_OK;
    }
    KvStatus rm(int64_t seq, int64_t p0, int64_t p1) {
        std::vector<std::pair<int64_t, int32_t>> hits;
        const KvStatus status = find(seq, p0, p1, &hits);
        if (status == LLAISYS_KV_OK) {
            for (const auto &hit : hits) {
                cells_of(seq)[size_t(hit.second)].seqs.erase(seq);
            }
        }
        return status;
    }
    KvStatus add(int64_t seq, int64_t p0, int64_t p1, int64_t delta) {
        std::vector<std::pair<int64_t, int32_t>> hits;
        const KvStatus status = find(seq, p0, p1, &hits);
        if (status != LLAISYS_KV_OK) {
            return status;
        }
        for (const auto &hit : hits) {
            if (hit.first + delta < 0 || hit.first + delta >= max_positions) {
                return LLAISYS_KV_INVALID_POS;
            }
        }
        for (const auto &hit : hits) {
            cells_of(seq)[size_t(hit.second)].pos += delta;
            cells_of(seq)[size_t(hit.second)].shift += delta;
        }
        return LLAISYS_KV_OK;
    }
    KvStatus keep(int64_t seq) {
        std::vector<std::pair<int64_t, int32_t>> hits;
        if (find(seq, 0, -1, &hits) != LLAISYS_KV_OK) {
            return LLAISYS_KV_INVALID_SEQ;
        }
        for (auto &stream : streams) {
            for (Cell &cell : stream) {
                const bool stays = cell.seqs.count(seq) != 0;
                cell.seqs.clear();
                if (stays) {
                    cell.seqs.insert(seq);
                }
            }
        }
        return LLAISYS_KV_OK;
    }
    // The text of KvCache::dump without the tokens, and the head of each stream.
    std::string state() const {
        std::string text;
        for (size_t s = 0; s < streams.size(); ++s) {
            for (int32_t c = 0; c < n_cells; ++c) {
                const Cell &cell = streams[s][size_t(c)];
                if (cell.seqs.empty()) {
                    continue;
                }
                text += llaisys::text("cell[", int32_t(s) * n_cells + c, "] = {seq_ids=[");
                const char *comma = "";
                for (const int64_t seq : cell.seqs) {
                    text += llaisys::text(comma, seq);
                    comma = ", ";
                }
                text += llaisys::text("], pos=", cell.pos, ", used=1}\n");
            }
        }
        text += llaisys::text("used ", used(), " peak ", peak, " heads");
        for (const int32_t head : heads) {
            text += llaisys::text(' ', head);
        }
        return text;
    }
    std::string list(const std::vector<int64_t> &seqs) const {
        std::set<std::pair<int64_t, int32_t>> found;
        for (size_t s = 0; s < streams.size(); ++s) {
            for (int32_t c = 0; c < n_cells; ++c) {
                for (const int64_t seq : seqs) {
                    if (streams[s][size_t(c)].seqs.count(seq) != 0) {
                        found.insert({streams[s][size_t(c)].pos, int32_t(s) * n_cells + c});
                    }
                }
            }
        }
        std::string text;
        for (const auto &entry : found) {
            text += llaisys::text(text.empty() ? "" : " ", entry.first, "@", entry.second);
        }
        return text;
    }
};

std::string state_without_tokens(const KvCache &cache) {
    std::string text = cache.dump();
    text.resize(std::min(text.size(), text.find("token[")));
    text += llaisys::text("used ", cache.stats().used, " peak ", cache.stats().peak, " heads");
    for (int32_t s = 0; s < cache.n_streams(); ++s) {
        text += llaisys::text(' ', cache.head(s));
    }
    return text;
}

class Walk {
public:
    Walk(uint32_t seed, int32_t n_streams, int32_t n_cells)
        : random_(seed), cache_(n_streams, n_cells, 40), naive_(n_streams, n_cells, 40),
          bytes_(size_t(n_streams * n_cells), -1) {
        for (int64_t seq = 0; seq < 6; ++seq) {
            const int32_t stream = int32_t(seq) % n_streams;
            CHECK_EQ(cache_.set_stream(seq, stream), LLAISYS_KV_OK);
            naive_.stream_of[seq] = stream;
        }
    }

    void step() {
        const int64_t seq = any(-1, 7), other = any(-1, 7), p0 = any(-2, 40), p1 = any(-2, 42);
        switch (any(0, 9)) {
        case 0:
            CHECK_EQ(cache_.seq_cp(other, seq, p0, p1), naive_.cp(other, seq, p0, p1));
            break;
        case 1:
        case 2:
            CHECK_EQ(cache_.seq_rm(seq, p0, p1), naive_.rm(seq, p0, p1));
            break;
        case 3: {
            const int64_t delta = any(-8, 8);
            CHECK_EQ(cache_.seq_add(seq, p0, p1, delta), naive_.add(seq, p0, p1, delta));
            break;
        }
        case 4:
            if (any(0, 4) == 0) {
                CHECK_EQ(cache_.seq_keep(seq), naive_.keep(seq));
            }
            break;
        default:
            decode();
        }
        compare();
    }

private:
    int64_t any(int64_t low, int64_t high) {
        return std::uniform_int_distribution<int64_t>(low, high)(random_);
    }

    Batch random_batch() {
        Batch batch;
        const int64_t n = any(1, 5);
        for (int64_t i = 0; i < n; ++i) {
            std::vector<int64_t> seqs;
            const bool bad = any(0, 60) == 0;
            const int64_t first = bad ? -1 : any(0, 5);
            seqs.push_back(first);
            while (any(0, 3) == 0) { // mostly of the same stream
                seqs.push_back(any(0, 20) == 0 ? any(0, 5)
                                               : (first + any(0, 5) * cache_.n_streams()) % 6);
            }
            batch.add(any(0, 80) == 0 ? any(-2, 45) : any(0, 39), seqs);
        }
        return batch;
    }

    // update, then one to three ubatches; sometimes it fails on the way and is rolled back.
    void decode() {
        cache_.update(&work_);
        std::vector<int> read;
        for (const int32_t src : work_.copy_src) {
            read.push_back(bytes_[size_t(src)]);
        }
        for (size_t i = 0; i < read.size(); ++i) {
            bytes_[size_t(work_.copy_dst[i])] = read[i];
        }
        check_shifts();

        std::vector<Batch> batches;
        Batch whole;
        for (int64_t n = any(1, 3); n > 0; --n) {
            batches.push_back(random_batch());
            const Batch &b = batches.back();
            for (size_t i = 0; i < b.positions.size(); ++i) {
                whole.add(b.positions[i],
                          {b.seq_ids.begin() + b.offsets[i], b.seq_ids.begin() + b.offsets[i + 1]});
            }
        }
        std::vector<Ubatch> ubatches;
        for (const Batch &b : batches) {
            ubatches.push_back(b.view());
        }
        const std::string before = state_of(cache_);
        const KvStatus status = cache_.prepare(ubatches.data(), int32_t(ubatches.size()), &plans_);
        CHECK_EQ(state_of(cache_), before);
        if (status == LLAISYS_KV_OK && any(0, 3) == 0) {
            fail_after(size_t(any(1, int64_t(ubatches.size()))), ubatches);
            CHECK_EQ(state_of(cache_), before);
            return;
        }
        std::vector<int32_t> expected, slots;
        CHECK_EQ(status, naive_.decode(whole, &expected));
        for (size_t u = 0; status == LLAISYS_KV_OK && u < ubatches.size(); ++u) {
            cache_.apply_ubatch(plans_[u], ubatches[u]);
            slots.insert(slots.end(), plans_[u].slots.begin(), plans_[u].slots.end());
        }
        if (status == LLAISYS_KV_OK) {
            CHECK_EQ(joined(slots), joined(expected));
            for (const int32_t slot : slots) { // "forward" writes the bytes of the new tokens
                bytes_[size_t(slot)] = ++written_;
                naive_.streams[size_t(slot / naive_.n_cells)][size_t(slot % naive_.n_cells)].bytes =
                    written_;
            }
        }
    }

    void fail_after(size_t n, const std::vector<Ubatch> &ubatches) {
        for (size_t u = 0; u < n; ++u) {
            cache_.apply_ubatch(plans_[u], ubatches[u]);
        }
        cache_.check_integrity();
        while (n-- > 0) {
            cache_.rollback_ubatch(plans_[n], ubatches[n]);
        }
    }

    void check_shifts() {
        std::map<int32_t, int64_t> expected, got;
        for (size_t s = 0; s < naive_.streams.size(); ++s) {
            for (int32_t c = 0; c < naive_.n_cells; ++c) {
                Naive::Cell &cell = naive_.streams[s][size_t(c)];
                const int32_t slot = int32_t(s) * naive_.n_cells + c;
                if (!cell.seqs.empty()) {
                    CHECK_EQ(bytes_[size_t(slot)], cell.bytes);
                    if (cell.shift != 0) {
                        expected[slot] = cell.shift;
                    }
                }
                cell.shift = 0;
            }
        }
        for (size_t i = 0; i < work_.shift_slots.size(); ++i) {
            got[work_.shift_slots[i]] = work_.shift_deltas[i];
        }
        CHECK(got == expected);
    }

    void compare() {
        CHECK_EQ(state_without_tokens(cache_), naive_.state());
        cache_.check_integrity();
        const std::vector<int64_t> set{any(0, 6), any(0, 6), any(0, 6)};
        CHECK_EQ(listed(cache_, set), naive_.list(set));
        CHECK_EQ(listed(cache_, {set[0]}), naive_.list({set[0]}));
        int64_t lowest = -1, highest = -1;
        for (const auto &cell : naive_.cells_of(set[0])) {
            if (cell.seqs.count(set[0]) != 0) {
                lowest = lowest < 0 ? cell.pos : std::min(lowest, cell.pos);
                highest = std::max(highest, cell.pos);
            }
        }
        CHECK_EQ(cache_.seq_pos_min(set[0]), lowest);
        CHECK_EQ(cache_.seq_pos_max(set[0]), highest);
    }

    std::mt19937 random_;
    KvCache cache_;
    Naive naive_;
    std::vector<SlotPlan> plans_;
    KvUpdate work_;
    std::vector<int> bytes_; // of each slot: which write they come from
    int written_ = 0;
};

} // namespace

TEST(random_steps_agree_with_a_naive_model) {
    for (uint32_t seed = 0; seed < 6; ++seed) {
        Walk walk(seed, 1 + int32_t(seed % 3), seed < 3 ? 13 : 70);
        for (int i = 0; i < 2000; ++i) {
            walk.step();
        }
    }
}

// -- BLOCK layout ------------------------------------------------------------------------------

namespace {

// Two sequences, blocks of 4: sequence 9 has 6 tokens in blocks 2, 0; sequence 4 has 1 in block 3.
struct Tables {
    std::vector<int64_t> positions{4, 5, 0}, seq_ids{9, 9, 4}, batch{9, 4};
    std::vector<int32_t> slots{0, 1, 12}, lens{6, 1}, tables{2, 0, -1, 3, -1, -1};
    BlockTables checker{4, 16, 11};

    const std::vector<int32_t> &check() {
        return checker.check({int32_t(positions.size()), positions.data(), seq_ids.data(),
                              slots.data(), int32_t(lens.size()), lens.data(), batch.data(),
                              tables.data(), 3});
    }
};

template <typename Change> void refused(std::initializer_list<const char *> parts, Change change) {
    Tables t;
    change(t);
    check::throws(__FILE__, __LINE__, "BlockTables::check", parts, [&] { t.check(); });
}

} // namespace

TEST(block_tables_give_the_row_of_each_token) {
    Tables t;
    CHECK_EQ(joined(t.check()), "0 0 1");
    CHECK_EQ(joined(t.check()), "0 0 1"); // what one call wrote does not count in the next
    t.seq_ids = {4, 9, 9};
    t.positions = {0, 5, 0};
    t.slots = {12, 1, 8};
    CHECK_EQ(joined(t.check()), "1 0 0");
    const int64_t pos = 0, zero = 0;
    const int32_t slot = 4, len = 1, block = 1;
    CHECK_EQ(joined(t.checker.check({1, &pos, nullptr, &slot, 1, &len, &zero, &block, 1})), "0");
}

TEST(block_tables_refuse_what_does_not_fit) {
    CHECK_THROWS(BlockTables(0, 16, 8), "block size", "0");
    CHECK_THROWS(BlockTables(4, 18, 8), "multiple", "18");
    CHECK_THROWS(BlockTables(4, 16, 0), "max_positions");
    refused({"n_tokens", "0"}, [](Tables &t) { t.positions.clear(); });
    refused({"n_seq", "0"}, [](Tables &t) { t.lens.clear(); });
    refused({"batch_seq_ids[1]", "repeats", "9"}, [](Tables &t) { t.batch[1] = 9; });
    refused({"batch_seq_ids[0]", "-2"}, [](Tables &t) { t.batch[0] = -2; });
    refused({"context_lens[1]", "[1, 12]", "got 0"}, [](Tables &t) { t.lens[1] = 0; });
    refused({"context_lens[0]", "[1, 12]", "got 13"}, [](Tables &t) { t.lens[0] = 13; });
    refused({"context_lens[0]", "at most", "11", "got 12"}, [](Tables &t) { t.lens[0] = 12; });
    refused({"block_tables[0][1]", "[0, 4)", "got 4"}, [](Tables &t) { t.tables[1] = 4; });
    refused({"block_tables[1][0]", "got -1"}, [](Tables &t) { t.tables[3] = -1; });
    refused({"block_tables[0][2]", "got -1"}, [](Tables &t) { t.lens[0] = 9; });
    refused({"seq_ids[1]", "got 5"}, [](Tables &t) { t.seq_ids[1] = 5; });
    refused({"positions[1]", "[0, 6)", "got 6"}, [](Tables &t) { t.positions[1] = 6; });
    refused({"positions[0]", "got -1"}, [](Tables &t) { t.positions[0] = -1; });
    refused({"slot_mapping[2]", "must be 12", "got 13"}, [](Tables &t) { t.slots[2] = 13; });
    refused({"slot_mapping[2]", "[0, 16)", "got 16"}, [](Tables &t) { t.slots[2] = 16; });
    refused({"slot_mapping[1]", "second time", "slot 0"}, [](Tables &t) {
        t.positions[1] = 4;
        t.slots[1] = 0;
    });
    Tables t;
    const auto refuse_null = [&](BlockStep step, const char *field) {
        check::throws(__FILE__, __LINE__, field, {field, "NULL"}, [&] { t.checker.check(step); });
    };
    const BlockStep good{3, t.positions.data(), t.seq_ids.data(), t.slots.data(),
                         2, t.lens.data(),      t.batch.data(),   t.tables.data(),
                         3};
    BlockStep bad = good;
    bad.positions = nullptr;
    refuse_null(bad, "positions");
    bad = good;
    bad.slot_mapping = nullptr;
    refuse_null(bad, "slot_mapping");
    bad = good;
    bad.context_lens = nullptr;
    refuse_null(bad, "context_lens");
    bad = good;
    bad.batch_seq_ids = nullptr;
    refuse_null(bad, "batch_seq_ids");
    bad = good;
    bad.block_tables = nullptr;
    refuse_null(bad, "block_tables");
    bad = good;
    bad.width = 0;
    CHECK_THROWS(t.checker.check(bad), "block_table_width", "0");
    CHECK_EQ(joined(t.checker.check(good)), "0 0 1"); // a refused step leaves nothing behind
}
