// Builds the attention metadata of a micro-batch: slots to write, and the cache entries visible to
// each token. Both KV layouts become block tables; the SLOT layout has blocks of one slot.
#pragma once

#include "models/model.hpp"
#include "runtime/kv_cache/kv_cache.hpp"
#include "runtime/runner/input_preparer.hpp"
#include "runtime/runner/step_arena.hpp"

#include <vector>

namespace llaisys::runtime {

class AttentionMetadataBuilder {
public:
    // windows [n_layers]: attention window of each layer, 0: none. Layers with equal windows share
    // their lists. is_bidirectional: a token sees all tokens of its run.
    explicit AttentionMetadataBuilder(const std::vector<int64_t> &windows,
                                      bool is_bidirectional = false);

    // Each builds the metadata of one micro-batch on the host; put() uses the last one built.

    // SLOT, after the cells are occupied: one list of cells for each distinct set of sequences of
    // the tokens, sorted by position and cell. slots: [range.n], read by put().
    void build_slot(const PreparedStep &step, const UbatchRange &range, const KvCache &cells,
                    const std::vector<int32_t> &slots);

    // BLOCK: `rows` [step.n_tokens] is the table row of each token of the step. put() reads the
    // arrays of `input`.
    void build_block(const PreparedStep &step, const UbatchRange &range,
                     const LlaisysStepInput &input, int32_t block_size,
                     const std::vector<int32_t> &rows);

    // The longest run of adjacent tokens with one list; 1: a decode step.
    int64_t longest_run() const { return runs_.are_all_single ? 1 : runs_.longest; }
    // Treats every token as a run of one. Does not change what it sees.
    void split_runs();

    // Single tokens with long sequences (ops::AttentionRuns::n_long), rounded up to a power of two so
    // that few captured graphs serve all steps; at most n_padded.
    int64_t n_long(int64_t n_padded) const;

    // Upper bound of the arena bytes that put() uses for this many tokens and table entries; those
    // of the last micro-batch built.
    int64_t max_bytes(int64_t n_tokens, int64_t n_table_entries) const;
    int64_t n_table_entries() const { return n_rows_ * width_; }
    // Writes the metadata into the arena. Its lists are valid until the next put. Padding tokens,
    // up to n_padded, see nothing and have no slot; they require longest_run() == 1. are_settled:
    // see ops::AttentionLists.
    models::AttentionMetadata put(StepArena *arena, int64_t n_padded, bool are_settled);

private:
    int32_t list_of(const PreparedStep &step, int32_t token, const KvCache &cells);
    void find_runs();
    void widen_runs();    // the end of each token becomes that of its run
    void order_singles(); // longest first, for load balance on a GPU

    // Layers with one attention window.
    struct Group {
        int64_t window;
        std::vector<int32_t> host_begin;
    };
    const bool is_bidirectional_;
    std::vector<Group> groups_;
    std::vector<int32_t> group_of_layer_;
    std::vector<ops::AttentionLists> lists_of_group_; // referenced by the metadata

    // The last micro-batch built.
    int64_t n_ = 0;
    const int32_t *slots_ = nullptr;  // [n]
    const int32_t *tables_ = nullptr; // [n_rows, width]
    int64_t n_rows_ = 0;
    int64_t width_ = 0;
    int32_t block_size_ = 1;
    ops::AttentionRuns runs_;

    // Host scratch, grow-only.
    std::vector<int32_t> host_rows_, host_end_, host_tables_, host_runs_, host_singles_,
        host_extents_;
    struct CellList {
        std::vector<int64_t> seq_ids; // sorted
        std::vector<int32_t> slots;
        std::vector<int64_t> positions;
    };
    std::vector<CellList> lists_; // the first n_lists_ are in use
    size_t n_lists_ = 0;
};

} // namespace llaisys::runtime
