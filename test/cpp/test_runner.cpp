// The runner with a fake model: step inputs, attention metadata in both layouts, order of
// operations.
#include "fake_model.hpp"

using namespace fake;

TEST(step_derives_positions_slots_and_the_last_output_row) {
    Rig rig;
    CHECK_EQ(rig.step(tokens({7, 8, 9})), LLAISYS_DECODE_OK);
    CHECK_EQ(rig.step(tokens({10})), LLAISYS_DECODE_OK);
    const Seen &first = rig.model.seen[0];
    CHECK(first.tokens == Ints({7, 8, 9}) && first.positions == Ints({0, 1, 2}));
    CHECK(first.output_rows == Ints({2}));
    CHECK(first.slots == Ints({0, 1, 2}) && first.rows == Ints({0, 0, 0}));
    CHECK(first.begin == Ints({0, 0, 0}) && first.end == Ints({1, 2, 3}));
    CHECK(first.tables == Ints({0, 1, 2}) && first.table_shape == Shape({1, 3}));
    CHECK_EQ(first.block_size, 1);
    const Seen &second = rig.model.seen[1];
    CHECK(second.positions == Ints({3}) && second.end == Ints({4}));
    CHECK(second.visible[0] == Ints({7, 8, 9, 10}));
    CHECK(rig.output_ids() == Ints({0}));
    CHECK_EQ(rig.runner.host_rows()[11], 1.0f);
}

TEST(positions_may_have_gaps_and_sequences_may_interleave) {
    Rig rig;
    Step step = tokens({1, 2, 3, 4});
    step.positions = {5, 0, 9, 1};
    step.seq_ids = {3, 8, 3, 8};
    step.logits = {1, 0, 0, 1};
    CHECK_EQ(rig.step(step), LLAISYS_DECODE_OK);
    const Seen &seen = rig.model.seen[0];
    CHECK(seen.positions == step.positions);
    CHECK(seen.rows == Ints({0, 1, 0, 1}) && seen.table_shape == Shape({2, 2}));
    CHECK(seen.visible == std::vector<Ints>({{1}, {2}, {1, 3}, {2, 4}}));
    CHECK(seen.output_rows == Ints({0, 3}) && rig.output_ids() == Ints({0, 3}));
    step = tokens({5, 6}); // derived from the last position of each sequence
    step.seq_ids = {8, 3};
    CHECK_EQ(rig.step(step), LLAISYS_DECODE_OK);
    CHECK(rig.model.seen[1].positions == Ints({2, 10}));
}

TEST(tokens_of_several_sequences_are_shared_and_equal_sets_share_one_list) {
    Rig rig;
    Step step = tokens({1, 2, 3, 4, 5});
    step.n_seq_id = {2, 2, 1, 1, 2};
    step.seq_ids = {4, 9, 9, 4, 4, 9, 9, 4}; // {4,9} {9,4} {4} {9} {9,4}
    CHECK_EQ(rig.step(step), LLAISYS_DECODE_OK);
    const Seen &seen = rig.model.seen[0];
    CHECK(seen.positions == Ints({0, 1, 2, 2, 3}));
    CHECK(seen.rows == Ints({0, 0, 1, 2, 0})); // the order of ids does not matter
    CHECK(seen.visible == std::vector<Ints>({{1}, {1, 2}, {1, 2, 3}, {1, 2, 4}, {1, 2, 3, 4, 5}}));
    CHECK_EQ(rig.runner.kv_stats().used_slots, 5);
    CHECK_EQ(rig.runner.kv_stats().n_sequences, 2);
}

TEST(embeddings_replace_token_ids) {
    Rig rig(2);
    Step step;
    step.embd = {21, 1, 2, 22, 3, 4, 23, 5, 6};
    CHECK_EQ(rig.step(step), LLAISYS_DECODE_OK);
    CHECK_EQ(rig.model.seen.size(), 2u);
    CHECK(rig.model.seen[0].tokens.empty());
    CHECK(rig.model.seen[0].embeddings == std::vector<float>({21, 1, 2, 22, 3, 4}));
    CHECK(rig.model.seen[1].embeddings == std::vector<float>({23, 5, 6}));
    CHECK(rig.model.seen[1].visible[0] == Ints({21, 22, 23}));
    CHECK_EQ(rig.step(tokens({9})), LLAISYS_DECODE_OK); // token ids again
    CHECK(rig.model.seen[2].embeddings.empty() && rig.model.seen[2].positions == Ints({3}));
}

TEST(large_step_is_split_and_output_rows_stay_in_order) {
    Rig rig(3);
    Step step = tokens({11, 12, 13, 14, 15, 16, 17, 18});
    step.logits = {1, 0, 1, 0, 0, 0, 1, 1}; // the second micro-batch has none
    CHECK_EQ(rig.step(step), LLAISYS_DECODE_OK);
    CHECK_EQ(rig.model.seen.size(), 3u);
    CHECK(rig.model.seen[0].output_rows == Ints({0, 2}));
    CHECK(rig.model.seen[1].output_rows.empty() && rig.model.seen[1].tokens == Ints({14, 15, 16}));
    CHECK(rig.model.seen[2].output_rows == Ints({0, 1}) && rig.model.seen[2].tokens.size() == 2);
    CHECK(rig.model.seen[1].visible[2] == Ints({11, 12, 13, 14, 15, 16}));
    CHECK(rig.output_ids() == Ints({0, 2, 6, 7}));
    for (const int32_t r : {0, 1, 2, 3}) {
        const int64_t token = step.tokens[size_t(rig.output_ids()[size_t(r)])];
        CHECK_EQ(rig.runner.host_rows()[r * kVocabulary + token + 1], 1.0f);
    }
}

TEST(step_without_output_rows_is_valid) {
    Rig rig;
    Step step = tokens({1, 2});
    step.logits = {0, 0};
    CHECK_EQ(rig.step(step), LLAISYS_DECODE_OK);
    CHECK_EQ(rig.runner.output().n_rows(), 0);
    CHECK(rig.runner.host_rows() == nullptr);
    CHECK_EQ(rig.step(tokens({3})), LLAISYS_DECODE_OK);
    CHECK_EQ(rig.runner.output().n_rows(), 1);
}

TEST(sliding_window_sets_the_begin_of_lists_in_both_layouts) {
    Rig slot(512, 3);
    CHECK_EQ(slot.step(tokens({1, 2, 3, 4, 5})), LLAISYS_DECODE_OK);
    Rig block(512, 3, true);
    Step step = tokens({1, 2, 3, 4, 5});
    step.positions = {0, 1, 2, 3, 4};
    step.slot_mapping = {8, 9, 10, 11, 4};
    step.context_lens = {5};
    step.batch_seq_ids = {0};
    step.block_tables = {2, 1, -1};
    CHECK_EQ(block.step(step), LLAISYS_DECODE_OK);
    for (const Rig *rig : {&slot, &block}) {
        const Seen &seen = rig->model.seen[0];
        CHECK(seen.begin == Ints({0, 0, 0, 1, 2}) && seen.end == Ints({1, 2, 3, 4, 5}));
        CHECK(seen.visible[4] == Ints({3, 4, 5}) && seen.visible[0] == Ints({1}));
    }
    // The window counts positions, not cells: gaps make fewer cells visible.
    Step far = tokens({6});
    far.positions = {6};
    CHECK_EQ(slot.step(far), LLAISYS_DECODE_OK);
    CHECK(slot.model.seen[1].visible[0] == Ints({5, 6}));
}

TEST(every_layer_has_its_own_window) {
    Rig mixed(512, std::vector<int64_t>{0, 2}, false);
    CHECK_EQ(mixed.step(tokens({1, 2, 3, 4})), LLAISYS_DECODE_OK);
    const Seen &seen = mixed.model.seen[0];
    CHECK(!seen.shares_lists && seen.begin == Ints({0, 0, 0, 0}));
    CHECK(seen.begin_of_layer_1 == Ints({0, 0, 1, 2}));
    Rig same(512, 2);
    CHECK_EQ(same.step(tokens({1, 2, 3, 4})), LLAISYS_DECODE_OK);
    CHECK(same.model.seen[0].shares_lists); // one list per distinct window
}

TEST(block_tables_reach_the_model_with_rows_and_ends) {
    Rig rig(3, 0, true);
    Step step = tokens({1, 2, 3, 30, 31}); // a prefill and two tokens of a running sequence
    step.positions = {0, 1, 2, 4, 5};
    step.seq_ids = {70, 70, 70, 80, 80};
    step.slot_mapping = {12, 13, 14, 0, 1};
    step.batch_seq_ids = {80, 70};
    step.context_lens = {6, 3};
    step.block_tables = {2, 0, 3, -1};
    step.logits = {0, 0, 1, 0, 1};
    CHECK_EQ(rig.step(step), LLAISYS_DECODE_OK);
    CHECK_EQ(rig.model.seen.size(), 2u);
    const Seen &first = rig.model.seen[0];
    CHECK(first.rows == Ints({1, 1, 1}) && first.end == Ints({1, 2, 3}));
    CHECK(first.slots == Ints({12, 13, 14}) && first.tables == Ints({2, 0, 3, -1}));
    CHECK(first.table_shape == Shape({2, 2}) && first.block_size == 4);
    CHECK(first.visible[2] == Ints({1, 2, 3}));
    const Seen &second = rig.model.seen[1];
    CHECK(second.rows == Ints({0, 0}) && second.end == Ints({5, 6}));
    CHECK(second.visible[1] == Ints({0, 0, 0, 0, 30, 31})); // its first block was never written
    CHECK(rig.output_ids() == Ints({2, 4}));
    CHECK_EQ(rig.runner.kv_stats().used_slots, 5);
    CHECK_EQ(rig.runner.kv_stats().n_sequences, 2);
    CHECK(rig.runner.cells() == nullptr);
}

TEST(step_runs_its_stages_in_order) {
    Rig rig(2);
    std::vector<int64_t> used, rows;
    rig.model.inspect = [&] {
        used.push_back(rig.runner.kv_stats().used_slots); // cells are occupied before the forward
        rows.push_back(rig.runner.output().n_rows());
    };
    Step step = tokens({1, 2, 3, 4, 5});
    step.logits = {1, 1, 0, 0, 1};
    CHECK_EQ(rig.step(step), LLAISYS_DECODE_OK);
    CHECK(rig.model.events ==
          std::vector<std::string>({"weights", "forward", "forward", "forward"}));
    CHECK(used == Ints({2, 4, 5}));
    CHECK(rows == Ints({2, 2, 3}));

    rig.model.weights_missing = true;
    const std::string before = rig.state();
    CHECK_THROWS(rig.step(tokens({1})), "q of layer 1 is missing");
    CHECK_EQ(rig.state(), before);
    CHECK_EQ(rig.runner.output().n_rows(), 0);
}

TEST(pending_shifts_are_applied_before_the_forward) {
    Rig rig;
    CHECK_EQ(rig.step(tokens({1, 2, 3})), LLAISYS_DECODE_OK);
    CHECK_EQ(rig.runner.cells()->seq_add(0, 1, -1, 4), LLAISYS_KV_OK);
    CHECK(rig.runner.cells()->needs_update());
    rig.model.inspect = [&] { CHECK(!rig.runner.cells()->needs_update()); };
    CHECK_EQ(rig.step(tokens({9})), LLAISYS_DECODE_OK);
    CHECK(rig.model.seen[1].positions == Ints({7}));
}
