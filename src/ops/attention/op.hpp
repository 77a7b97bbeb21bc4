// Attention over slot lists: block tables, or cell lists as tables with blocks of one. Contract:
// llaisysAttention in include/llaisys/ops.h.
#pragma once

#include "ops/kv_layer.hpp"

#include <vector>

namespace llaisys::ops {

// Which tokens stand together: neighbours of one list, which a GPU takes as one tile. A caller who
// knows says so; the operator finds out otherwise, which waits for the device.
struct AttentionRuns {
    bool is_known = false;
    bool are_all_single = false; // every token is alone in its list
    int64_t n_runs = 0;
    int64_t longest = 0; // tokens of the longest run
    int64_t n_singles = 0;
    Tensor runs; // i32 [n_runs, 2]: first token and number of tokens, at least 2
    // i32 [n_singles]: the other tokens, begun with in this order; not defined where all are single: in theirs
    Tensor singles;
};

// Finds the runs of q_rows [n] (host memory): replaces *runs and *singles, flat, and fills in the
// numbers of *found.
void find_attention_runs(const int32_t *q_rows, int64_t n, std::vector<int32_t> *runs,
                         std::vector<int32_t> *singles, AttentionRuns *found);

// Which entries of which list each query token sees; all on the device of the queries.
struct AttentionLists {
    Tensor q_rows; // i32 [n]: row of tables
    Tensor begin;  // i32 [n]: first entry seen
    Tensor end;    // i32 [n]: one past the last entry seen
    Tensor tables; // i32 [rows, width]: block numbers; entries past a list's end are not read
    int32_t block_size = 1;
    // i32 [1], when defined: the width of the tables, wherever it changes from step to step while
    // the memory stays (a captured graph). tables then has the largest width.
    Tensor width;
    AttentionRuns runs;
    // Nothing that this operator reads was written by work that may still be running on the stream,
    // but the queries and each list's last entry: a device may look at the rest before its turn.
    bool are_settled = false;
};

void attention(const device::Stream &stream, const Tensor &out, const Tensor &q, const KvLayer &kv,
               const AttentionLists &lists, float scale);

} // namespace llaisys::ops
