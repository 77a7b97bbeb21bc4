// Validation of BLOCK steps: every rule of block_layout.hpp.
#include "kv_helpers.hpp"
#include "runtime/kv_cache/block_layout.hpp"

using namespace kv_test;

namespace {

// Two sequences, blocks of 4: sequence 9 has 6 tokens in blocks 2, 0; sequence 4 has 1 in block 3.
struct Tables {
    std::vector<int64_t> positions{4, 5, 0}, seq_ids{9, 9, 4}, batch{9, 4};
    std::vector<int32_t> slots{0, 1, 12}, lens{6, 1}, tables{2, 0, -1, 3, -1, -1};
    BlockTables checker{4, 16, 11};

    LlaisysStepInput input() const {
        LlaisysStepInput step{};
        step.n_tokens = int32_t(positions.size());
        step.positions = positions.data();
        step.seq_ids = seq_ids.data();
        step.slot_mapping = slots.data();
        step.n_seq = int32_t(lens.size());
        step.context_lens = lens.data();
        step.batch_seq_ids = batch.data();
        step.block_tables = tables.data();
        step.block_table_width = 3;
        return step;
    }
    const std::vector<int32_t> &check() { return checker.check(input()); }
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
    CHECK_EQ(joined(t.check()), "0 0 1"); // slots of an earlier call do not count
    t.seq_ids = {4, 9, 9};
    t.positions = {0, 5, 0};
    t.slots = {12, 1, 8};
    CHECK_EQ(joined(t.check()), "1 0 0");
    Tables one;
    one.positions = {0};
    one.slots = {4};
    one.lens = {1};
    one.batch = {0};
    one.tables = {1, -1, -1};
    LlaisysStepInput of_sequence_0 = one.input();
    of_sequence_0.seq_ids = nullptr;
    CHECK_EQ(joined(one.checker.check(of_sequence_0)), "0");
}

TEST(block_tables_reject_invalid_steps) {
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
    const auto refuse_null = [&](const LlaisysStepInput &step, const char *field) {
        check::throws(__FILE__, __LINE__, field, {field, "NULL"}, [&] { t.checker.check(step); });
    };
    const LlaisysStepInput good = t.input();
    LlaisysStepInput bad = good;
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
    bad.block_table_width = 0;
    CHECK_THROWS(t.checker.check(bad), "block_table_width", "0");
    CHECK_EQ(joined(t.checker.check(good)), "0 0 1"); // a rejected step has no effect
}
