// Paged attention over slot lists: block tables, or cell lists as tables with blocks of one.
// Contract: llaisysAttention in include/llaisys/ops.h.
#pragma once

#include "ops/kv_layer.hpp"

#include <vector>

namespace llaisys::ops {

// Runs of adjacent tokens of one sequence, which a GPU processes as one tile. A caller that knows
// them passes them; otherwise the operator computes them, which synchronises with the device.
struct AttentionRuns {
    bool is_known = false;
    bool are_all_single = false; // every token is alone in its sequence
    int64_t n_runs = 0;
    int64_t longest = 0; // tokens of the longest run
    int64_t n_singles = 0;
    Tensor runs; // i32 [n_runs, 2]: first token and number of tokens, at least 2
    // i32 [n_singles]: the other tokens in processing order; undefined where all are single
    // (natural order)
    Tensor singles;
    // The first n_long of singles include every token that sees more than kLongSequence entries; a
    // device may split these over more blocks. 0: none, more than kMaxLongSequences, or unknown.
    int64_t n_long = 0;
    // i32 [n_runs, 2]: position of the run's sequence in a dense copy of the entries of all runs, a
    // multiple of kCopyPage, and entries of the sequence. Undefined: unknown.
    Tensor extents;
    int64_t n_copied = 0; // entries of the copy
};

constexpr int64_t kCopyPage = 16; // entries

constexpr int64_t kLongSequence = 4096; // entries
constexpr int64_t kMaxLongSequences = 16;

// Find the runs of q_rows [n] (host memory): replaces *runs and *singles, flat, and fills the
// counts of *found.
void find_attention_runs(const int32_t *q_rows, int64_t n, std::vector<int32_t> *runs,
                         std::vector<int32_t> *singles, AttentionRuns *found);
// Find the extents of runs, from `end` [n] of the tokens (host memory): replaces *extents, flat, and
// returns n_copied; 0 if it does not fit in 32 bits.
int64_t find_run_extents(const int32_t *end, const std::vector<int32_t> &runs,
                         std::vector<int32_t> *extents);

// Visible entries of each query token; all tensors are on the device of the queries.
struct AttentionLists {
    Tensor q_rows; // i32 [n]: row of tables
    Tensor begin;  // i32 [n]: first visible entry
    Tensor end;    // i32 [n]: one past the last visible entry
    Tensor tables; // i32 [rows, width]: block tables; entries past a sequence's end are not read
    int32_t block_size = 1;
    // i32 [1], if defined: width of the tables where it changes from step to step while the memory
    // stays (a captured graph). tables then has the largest width.
    Tensor width;
    AttentionRuns runs;
    // All inputs except the queries and each sequence's last entry were complete before the work
    // queued on the stream: a kernel may read them before its grid dependency is resolved.
    bool are_settled = false;
};

// out [n, heads, kv.value_dim]. soft_cap: a score s becomes soft_cap * tanh(s / soft_cap); 0: none.
// sinks f32 [heads]: exp(sink) is added to the softmax denominator of a head; null: none.
void attention(const device::Stream &stream, const Tensor &out, const Tensor &q, const KvLayer &kv,
               const AttentionLists &lists, float scale, float soft_cap = 0.0f,
               const Tensor *sinks = nullptr);
// The CPU checks begin, end and the blocks that they reach before it writes anything; CUDA does not
// detect slots outside the cache.
decltype(attention) attention_cpu, attention_cuda;

} // namespace llaisys::ops
