// Runner failures (rollback, full cache, invalid input), steady state, sampling and slot copies.
#include "fake_device.hpp"
#include "fake_model.hpp"
#include "kv_integrity.hpp"

using namespace fake;

namespace {

// A valid BLOCK step of three tokens of sequence 7; tests invalidate one field at a time.
Step block_step() {
    Step step = tokens({1, 2, 3});
    step.positions = {3, 4, 5};
    step.seq_ids = {7, 7, 7};
    step.slot_mapping = {11, 0, 1};
    step.batch_seq_ids = {7};
    step.context_lens = {6};
    step.block_tables = {2, 0};
    return step;
}

LlaisysSamplingMetadata greedy(int32_t n_rows) { // at most 3
    static const double zeros[3] = {};
    static const LlaisysSamplingNumber temperature = {"temperature", zeros};
    LlaisysSamplingMetadata sampling{};
    sampling.struct_size = sizeof sampling;
    sampling.n_rows = n_rows;
    sampling.numbers = &temperature;
    sampling.n_numbers = 1;
    return sampling;
}

} // namespace

TEST(failure_in_any_micro_batch_is_rolled_back) {
    for (int failing = 1; failing <= 4; ++failing) {
        Rig rig(2), other(2);
        for (Rig *each : {&rig, &other}) {
            CHECK_EQ(each->step(tokens({40, 41, 42})), LLAISYS_DECODE_OK);
        }
        const std::string before = rig.state();
        Step step = tokens({1, 2, 3, 4, 5, 6, 7});
        step.seq_ids = {0, 5, 0, 5, 6, 6, 0};
        step.logits = {1, 1, 1, 1, 1, 1, 1};
        rig.model.forwards_until_failure = failing;
        CHECK_THROWS(rig.step(step), "the fake forward failed");
        CHECK_EQ(rig.state(), before);
        kv_test::check_integrity(*rig.runner.cells());
        CHECK_EQ(rig.runner.output().n_rows(), 0);
        CHECK(rig.runner.host_rows() == nullptr);

        // Later steps behave as without the failure, including old bytes.
        CHECK_EQ(rig.step(step), LLAISYS_DECODE_OK);
        CHECK_EQ(other.step(step), LLAISYS_DECODE_OK);
        CHECK_EQ(rig.state(), other.state());
        CHECK(rig.model.seen.back().visible == other.model.seen.back().visible);
        CHECK(rig.model.seen.back().visible.back() == Ints({40, 41, 42, 1, 3, 7}));
    }
}

TEST(failed_block_step_has_no_rows_and_the_next_succeeds) {
    Rig rig(2, 0, true);
    CHECK_EQ(rig.step(block_step()), LLAISYS_DECODE_OK);
    const std::string before = rig.state();
    rig.model.forwards_until_failure = 2;
    CHECK_THROWS(rig.step(block_step()), "the fake forward failed");
    CHECK_EQ(rig.state(), before);
    CHECK_EQ(rig.runner.output().n_rows(), 0);
    CHECK_EQ(rig.step(block_step()), LLAISYS_DECODE_OK);
    CHECK_EQ(rig.runner.output().n_rows(), 1);
}

TEST(full_cache_returns_no_kv_slot_and_changes_nothing) {
    Rig rig(4); // 16 cells
    CHECK_EQ(rig.step(tokens(Ints(14, 5))), LLAISYS_DECODE_OK);
    const std::string before = rig.state();
    const size_t n_forwards = rig.model.seen.size();
    CHECK_EQ(rig.step(tokens({1, 2, 3})), LLAISYS_DECODE_NO_KV_SLOT);
    CHECK_EQ(rig.step(tokens(Ints(100, 5))), LLAISYS_DECODE_NO_KV_SLOT); // more than all cells
    CHECK_EQ(rig.state(), before);
    CHECK_EQ(rig.model.seen.size(), n_forwards);
    CHECK_EQ(rig.runner.output().n_rows(), 0);
    CHECK_EQ(rig.step(tokens({1, 2})), LLAISYS_DECODE_OK); // exactly full
    CHECK_EQ(rig.step(tokens({1})), LLAISYS_DECODE_NO_KV_SLOT);
    CHECK_EQ(rig.runner.cells()->seq_rm(0, 0, 4), LLAISYS_KV_OK);
    CHECK_EQ(rig.step(tokens({1, 2, 3, 4})), LLAISYS_DECODE_OK);
}

// More tokens than slots can never run, so the arrays must not be read.
TEST(huge_token_count_is_rejected_before_arrays_are_read) {
    LlaisysStepInput input = tokens({1}).view();
    const int64_t one = 1;
    input.token_ids = &one;
    input.n_tokens = INT32_MAX;
    Rig slot;
    CHECK_EQ(slot.runner.step(input), LLAISYS_DECODE_NO_KV_SLOT);
    Rig block(512, 0, true);
    CHECK_THROWS(block.runner.step(input), "n_tokens", "16 slots", "2147483647");
}

TEST(errors_name_invalid_tokens_sequences_and_positions) {
    Rig rig;
    CHECK_EQ(rig.step(tokens({1, 2, 3})), LLAISYS_DECODE_OK);
    const std::string before = rig.state();
    CHECK_THROWS(rig.step(tokens({})), "n_tokens must be at least 1, got 0");
    CHECK_THROWS(rig.step(tokens({0, 50})), "token_ids[1] must be in [0, 50), got 50");
    CHECK_THROWS(rig.step(tokens({-1})), "token_ids[0]", "got -1");
    LlaisysStepInput bare = tokens({1}).view();
    bare.token_ids = nullptr;
    CHECK_THROWS(rig.runner.step(bare), "token_ids and embd are both NULL");
    bare.n_tokens = -4;
    CHECK_THROWS(rig.runner.step(bare), "n_tokens", "-4");

    Step step = tokens({4, 5});
    step.seq_ids = {1, -2};
    CHECK_THROWS(rig.step(step), "seq_ids[1]", "-2");
    step.seq_ids = {1, 2, 3};
    CHECK_THROWS(rig.step(step), "n_seq_ids must be the sum of n_seq_id, 2, got 3");
    step.n_seq_id = {0, 3};
    CHECK_THROWS(rig.step(step), "n_seq_id[0]", "got 0");
    step.n_seq_id = {2, 1 << 21};
    CHECK_THROWS(rig.step(step), "n_seq_id[1]", "2097152");
    step.n_seq_id = {1, 2};
    step.seq_ids = {1, 3, 3};
    CHECK_THROWS(rig.step(step), "token 1", "sequence 3 twice");
    step.seq_ids.clear();
    CHECK_THROWS(rig.step(step), "seq_ids is NULL", "sums to 3");

    step = tokens({4, 5});
    step.positions = {3, 100};
    CHECK_THROWS(rig.step(step), "positions[1] must be in [0, 100), got 100");
    step.positions = {-1, 3};
    CHECK_THROWS(rig.step(step), "positions[0]", "got -1");
    step.positions = {2, 3}; // sequence 0 holds 0, 1, 2
    CHECK_THROWS(rig.step(step), "positions[0] must be above 2", "got 2");
    step.positions = {4, 4};
    CHECK_THROWS(rig.step(step), "positions[1] must be above 4", "got 4");
    CHECK_EQ(rig.state(), before);
    CHECK_EQ(rig.model.seen.size(), 1u);
    step.positions = {99};
    step.tokens = {4};
    CHECK_EQ(rig.step(step), LLAISYS_DECODE_OK);
    CHECK_THROWS(rig.step(tokens({4})), "positions[0] must be in [0, 100), got 100"); // derived
    CHECK_EQ(rig.runner.output().n_rows(), 0);
}

TEST(errors_name_invalid_block_fields) {
    Rig rig(512, 0, true);
    const auto broken = [](const std::function<void(Step *)> &change) {
        Step step = block_step();
        change(&step);
        return step;
    };
    CHECK_THROWS(rig.step(broken([](Step *s) { s->positions.clear(); })), "positions is NULL");
    CHECK_THROWS(rig.step(broken([](Step *s) { s->slot_mapping[1] = 5; })), "slot_mapping[1]", "5");
    CHECK_THROWS(rig.step(broken([](Step *s) { s->block_tables[1] = 4; })), "block_tables[0][1]");
    CHECK_THROWS(rig.step(broken([](Step *s) { s->context_lens[0] = 9; })), "context_lens[0]", "9");
    CHECK_THROWS(rig.step(broken([](Step *s) { s->seq_ids[2] = 8; })), "seq_ids[2]", "8");
    CHECK_THROWS(rig.step(broken([](Step *s) { s->positions[2] = 4; })), "positions[2]", "above 4");
    CHECK_THROWS(rig.step(broken([](Step *s) { s->batch_seq_ids.clear(); })), "n_seq");
    CHECK_THROWS(rig.step(broken([](Step *s) {
        s->n_seq_id = {1, 2, 1};
        s->seq_ids = {7, 7, 8, 7};
    })),
                 "n_seq_id must be 1");
    CHECK(rig.model.seen.empty());
    CHECK_EQ(rig.runner.kv_stats().peak_used_slots, 0);
    CHECK_EQ(rig.step(block_step()), LLAISYS_DECODE_OK);
}

TEST(steady_state_allocates_no_device_memory) {
    const fake::CountedAllocations allocations;
    Rig rig(4);
    Step prompt = tokens({1, 2, 3, 4, 5, 6, 7, 8});
    prompt.logits = {1, 1, 1, 1, 1, 1, 1, 1};
    CHECK_EQ(rig.step(prompt), LLAISYS_DECODE_OK);
    const float *rows = rig.runner.host_rows();
    CHECK_EQ(rig.step(tokens({0})), LLAISYS_DECODE_OK); // the first single token
    CHECK_EQ(rig.runner.cells()->seq_rm(0, 8, -1), LLAISYS_KV_OK);
    const int64_t before = allocations.count();
    for (int64_t i = 0; i < 50; ++i) {
        CHECK_EQ(rig.step(tokens({i % 7})), LLAISYS_DECODE_OK);
        CHECK(rig.runner.host_rows() == rows);
        CHECK_EQ(rig.runner.cells()->seq_rm(0, 8, -1), LLAISYS_KV_OK);
    }
    CHECK_EQ(allocations.count(), before);
    CHECK_EQ(rig.runner.kv_stats().used_slots, 8);
    CHECK_EQ(rig.runner.kv_stats().peak_used_slots, 9);
}

TEST(first_long_prompt_allocates_no_device_memory) {
    for (const bool is_block : {false, true}) {
        const fake::CountedAllocations allocations;
        Rig rig(16, 0, is_block);
        const int64_t before = allocations.count();
        CHECK(before > 0);
        Step step = tokens(Ints(16, 3)); // as many as there are slots
        step.logits.assign(16, 1);
        if (is_block) {
            for (int32_t i = 0; i < 16; ++i) {
                step.positions.push_back(i);
                step.slot_mapping.push_back(i);
            }
            step.seq_ids.assign(16, 7);
            step.batch_seq_ids = {7};
            step.context_lens = {16};
            step.block_tables = {0, 1, 2, 3};
        }
        CHECK_EQ(rig.step(step), LLAISYS_DECODE_OK);
        CHECK_EQ(rig.output_ids().size(), size_t(16));
        CHECK_EQ(allocations.count(), before);
    }
}

TEST(execute_step_is_step_then_sample) {
    Rig rig(2);
    int32_t ids[3] = {-1, -1, -1};
    Step step = tokens({4, 30, 9});
    step.logits = {1, 0, 1};
    CHECK_EQ(rig.runner.execute_step(step.view(), greedy(2), ids), LLAISYS_DECODE_OK);
    CHECK_EQ(ids[0], 5);
    CHECK_EQ(ids[1], 10);
    CHECK_EQ(ids[2], -1);
    CHECK_EQ(rig.step(step), LLAISYS_DECODE_OK); // step() and sample() do the same
    int32_t again[2] = {};
    rig.runner.sample(greedy(2), again);
    CHECK(again[0] == 5 && again[1] == 10);
    CHECK_THROWS(rig.runner.sample(greedy(3), again), "row");

    ids[0] = -1; // a step without free cells samples nothing
    CHECK_EQ(rig.runner.execute_step(tokens(Ints(11, 1)).view(), greedy(1), ids),
             LLAISYS_DECODE_NO_KV_SLOT);
    CHECK_EQ(ids[0], -1);
    CHECK_THROWS(rig.runner.sample(greedy(1), ids), "row"); // no output rows
}

TEST(copy_slots_reads_all_before_writing_and_checks_indices) {
    Rig rig(512, 0, true);
    CHECK_EQ(rig.step(block_step()), LLAISYS_DECODE_OK); // keys 1, 2, 3 in slots 11, 0, 1
    const int32_t src[] = {11, 0, 1};
    const int32_t dst[] = {0, 1, 11};
    rig.runner.copy_slots(src, dst, 3); // a cycle
    Step probe = block_step();
    probe.tokens = {9};
    probe.positions = {5};
    probe.seq_ids = {7};
    probe.slot_mapping = {1};
    CHECK_EQ(rig.step(probe), LLAISYS_DECODE_OK);
    CHECK(rig.model.seen.back().visible[0] == Ints({0, 0, 0, 3, 1, 9}));

    const int32_t outside[] = {0, 16, 2};
    const int32_t twice[] = {5, 6, 5};
    const int64_t delta[] = {1, 1, 1};
    CHECK_THROWS(rig.runner.copy_slots(outside, dst, 3), "src[1] must be in [0, 16), got 16");
    CHECK_THROWS(rig.runner.copy_slots(src, outside, 3), "dst[1]", "16");
    CHECK_THROWS(rig.runner.copy_slots(src, twice, 3), "dst names slot 5 twice");
    CHECK_THROWS(rig.runner.shift_slots(outside, delta, 3), "slots[1]", "16");
    CHECK_THROWS(rig.runner.shift_slots(twice, delta, 3), "slots names slot 5 twice");
    rig.runner.copy_slots(twice, dst, 3); // one source for two targets is valid
    rig.runner.copy_slots(nullptr, nullptr, 0);
    rig.runner.shift_slots(nullptr, nullptr, 0);
}
