// Says where the tokens of a micro-batch write their keys and values and what each of them sees.
// From here on the two KV layouts are one: both are tables of blocks, the SLOT layout with blocks of
// one.
#pragma once

#include "models/model.hpp"
#include "runtime/kv_cache/block_layout.hpp"
#include "runtime/kv_cache/kv_cache.hpp"
#include "runtime/runner/input_preparer.hpp"
#include "runtime/runner/step_arena.hpp"

#include <vector>

namespace llaisys::runtime {

class AttentionMetadataBuilder {
public:
    // windows [n_layers]: the attention window of each layer, 0: none. Layers of one window share
    // their lists.
    explicit AttentionMetadataBuilder(const std::vector<int64_t> &windows);

    // Each describes one micro-batch; bytes() and put() are about the last one described.

    // SLOT, after the cells of the micro-batch were taken: one list of cells for each distinct set
    // of sequences among its tokens, sorted by position and cell. slots: [range.n], used by put().
    void describe_slot(const PreparedStep &step, const UbatchRange &range, const KvCache &cells,
                       const std::vector<int32_t> &slots);

    // BLOCK: `rows` [step.n_tokens] gives the table row of each token of the step. The arrays of
    // `blocks` are used by put().
    void describe_block(const PreparedStep &step, const UbatchRange &range, const BlockStep &blocks,
                        int32_t block_size, const std::vector<int32_t> &rows);

    // Tokens of one list that stand together, at most; 1: what a decode step looks like.
    int64_t longest_run() const { return runs_.are_all_single ? 1 : runs_.longest; }
    // From here on each token counts as alone in its list: it sees what it saw before.
    void part_runs();

    // Single tokens with long sequences (ops::AttentionRuns::n_long), rounded up to a power of two so
    // that few captured graphs serve all steps; at most n_padded.
    int64_t n_long(int64_t n_padded) const;

    // What put() takes of the arena for n_padded tokens.
    int64_t bytes(int64_t n_padded) const;
    // What it takes at most for so many tokens and entries of the tables.
    int64_t most_bytes(int64_t n_tokens, int64_t n_table_entries) const;
    // Writes it down; the metadata points to lists that are good until the next put. Tokens beyond
    // those of the micro-batch, up to n_padded, see nothing and have no slot; there are such only
    // when longest_run() is 1. are_settled: see ops::AttentionLists.
    models::AttentionMetadata put(StepArena *arena, int64_t n_padded, bool are_settled);

private:
    int32_t list_of(const PreparedStep &step, int32_t token, const KvCache &cells);
    void find_runs();
    void order_singles(); // the longest lists first: a GPU begins with them

    // The layers that see through one window.
    struct Group {
        int64_t window;
        std::vector<int32_t> host_begin;
    };
    std::vector<Group> groups_;
    std::vector<int32_t> group_of_layer_;
    std::vector<ops::AttentionLists> lists_of_group_; // what the metadata points to

    // The micro-batch that was described.
    int64_t n_ = 0;
    const int32_t *slots_ = nullptr;  // [n]
    const int32_t *tables_ = nullptr; // [n_rows, width]
    int64_t n_rows_ = 0;
    int64_t width_ = 0;
    int32_t block_size_ = 1;
    ops::AttentionRuns runs_;

    // Host scratch, grow-only.
    std::vector<int32_t> host_rows_, host_end_, host_tables_, host_runs_, host_singles_;
    struct CellList {
        std::vector<int64_t> seq_ids; // the set, rising
        std::vector<int32_t> slots;
        std::vector<int64_t> positions;
    };
    std::vector<CellList> lists_; // the first n_lists_ are in use
    size_t n_lists_ = 0;
};

} // namespace llaisys::runtime
