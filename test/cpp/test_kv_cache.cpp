// KV metadata: every rule of kv_cache.hpp. See also test_kv_cells.cpp, test_kv_blocks.cpp and
// test_kv_random.cpp.
#include "kv_helpers.hpp"

using namespace kv_test;

// -- A step ------------------------------------------------------------------------------------

TEST(construction_rejects_invalid_sizes) {
    CHECK_THROWS(KvCache(0, 4, 4), "streams", "0");
    CHECK_THROWS(KvCache(1, 0, 4), "cells", "0");
    CHECK_THROWS(KvCache(1, 4, 0), "max_positions", "0");
    CHECK_THROWS(KvCache(1 << 16, 1 << 16, 4), "2147483647", "4294967296");
}

TEST(slots_are_allocated_from_the_head_with_wrap_around) {
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

TEST(prepare_checks_tokens_in_order_before_capacity) {
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
    CHECK_EQ(put(cache, run_of(5, 8, 10)), LLAISYS_KV_OK); // the other stream has free cells
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
    check_integrity(cache);
    CHECK_EQ(state_of(cache), before);
    CHECK_THROWS(cache.rollback_ubatch(plans[0], ubatches[0]), "not the last one");
    cache.apply_ubatch(plans[0], ubatches[0]); // a plan is valid after its rollback
    CHECK_EQ(state_of(cache), between);
}

TEST(stale_plan_is_rejected) {
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

TEST(peak_ignores_rolled_back_steps) {
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
    CHECK_EQ(cache.seq_cp(3, 0, 0, -1), LLAISYS_KV_OK); // some are already shared
    CHECK_EQ(listed(cache, {3}), "0@0 1@1 2@2 3@3");
    const std::string before = state_of(cache);
    CHECK_EQ(cache.seq_cp(0, 0, -1, -1), LLAISYS_KV_OK);
    CHECK_EQ(state_of(cache), before);
    CHECK_EQ(cache.stats().used, 4);
    CHECK_EQ(cache.stats().n_sequences, 2);
    CHECK(!cache.needs_update());
    check_integrity(cache);
}

TEST(seq_rm_frees_only_cells_without_a_sequence) {
    KvCache cache(1, 4, 10);
    CHECK_EQ(put(cache, run_of(0, 0, 4)), LLAISYS_KV_OK);
    CHECK_EQ(cache.seq_cp(1, 0, 0, 2), LLAISYS_KV_OK);
    CHECK_EQ(cache.seq_rm(0, -1, 3), LLAISYS_KV_OK);
    CHECK_EQ(cache.stats().used, 3);
    CHECK_EQ(listed(cache, {0}), "3@3");
    CHECK_EQ(listed(cache, {1}), "0@0 1@1");
    CHECK_EQ(put(cache, run_of(0, 4, 5)), LLAISYS_KV_OK); // the freed cell is reused
    CHECK_EQ(listed(cache, {0}), "3@3 4@2");
    CHECK_EQ(cache.seq_rm(0, -1, -1), LLAISYS_KV_OK);
    CHECK_EQ(cache.seq_pos_max(0), -1);
    CHECK_EQ(cache.seq_rm(0, -1, -1), LLAISYS_KV_INVALID_SEQ);
}

TEST(seq_add_moves_shared_cells_for_all_sequences_with_one_shift) {
    KvCache cache(1, 8, 20);
    CHECK_EQ(put(cache, run_of(0, 0, 4)), LLAISYS_KV_OK);
    CHECK_EQ(cache.seq_cp(1, 0, 2, 4), LLAISYS_KV_OK);
    CHECK_EQ(cache.seq_add(0, 2, -1, 0), LLAISYS_KV_OK);
    CHECK(!cache.needs_update());
    CHECK_EQ(cache.seq_add(0, 3, -1, 5), LLAISYS_KV_OK);
    CHECK_EQ(listed(cache, {1}), "2@2 8@3");
    CHECK_EQ(cache.seq_add(1, 0, -1, -2), LLAISYS_KV_OK);
    CHECK_EQ(listed(cache, {0}), "0@0 0@2 1@1 6@3"); // sorted again
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
    // A shift and its inverse need no rotation; neither does a freed cell.
    CHECK_EQ(cache.seq_add(0, 6, -1, 1), LLAISYS_KV_OK);
    CHECK_EQ(cache.seq_add(0, 7, -1, -1), LLAISYS_KV_OK);
    CHECK_EQ(cache.seq_add(0, 1, 2, 1), LLAISYS_KV_OK);
    CHECK_EQ(cache.seq_rm(0, 2, 3), LLAISYS_KV_OK);
    cache.update(&work);
    CHECK(work.shift_slots.empty());
    check_integrity(cache);
}

TEST(seq_keep_removes_all_others_in_all_streams) {
    KvCache cache(2, 4, 20);
    CHECK_EQ(cache.set_stream(8, 1), LLAISYS_KV_OK);
    CHECK_EQ(put(cache, Batch().add(0, {0, 1}).add(1, {0}).add(1, {1}).add(0, {8})), LLAISYS_KV_OK);
    CHECK_EQ(cache.seq_keep(5), LLAISYS_KV_INVALID_SEQ);
    CHECK_EQ(cache.stats().n_sequences, 3);
    CHECK_EQ(cache.seq_keep(1), LLAISYS_KV_OK);
    CHECK_EQ(cache.stats().n_sequences, 1);
    CHECK_EQ(cache.stats().used, 2);
    CHECK_EQ(listed(cache, {1}), "0@0 1@2");
    check_integrity(cache);
}

TEST(stream_is_fixed_while_a_sequence_has_cells) {
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

TEST(seq_cp_across_streams_occupies_cells_and_records_copies) {
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
    CHECK_EQ(joined(work.shift_slots), "2 6"); // the copy needs the rotation too
    CHECK_EQ(work.shift_deltas[1], 5);
    CHECK(!cache.needs_update());
    check_integrity(cache);
}

TEST(chained_copies_resolve_to_the_slot_with_the_bytes) {
    KvCache cache(3, 1, 20);
    KvUpdate work;
    CHECK_EQ(cache.set_stream(1, 1), LLAISYS_KV_OK);
    CHECK_EQ(cache.set_stream(2, 2), LLAISYS_KV_OK);
    CHECK_EQ(put(cache, run_of(0, 0, 1)), LLAISYS_KV_OK);
    CHECK_EQ(cache.seq_cp(1, 0, 0, 1), LLAISYS_KV_OK); // slot 0 -> 1
    CHECK_EQ(cache.seq_cp(2, 1, 0, 1), LLAISYS_KV_OK); // slot 1 -> 2: its bytes are still in 0
    CHECK_EQ(cache.seq_rm(0, 0, 1), LLAISYS_KV_OK);
    CHECK_EQ(cache.seq_cp(0, 2, 0, 1), LLAISYS_KV_OK); // copied back: no copy needed
    CHECK_EQ(cache.seq_rm(1, 0, 1), LLAISYS_KV_OK);    // slot 1 is unused
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
