// Sampling operators over rows of logits in device memory. The maths is base/sampling.hpp and
// docs/guides/sampling.md; the results are bitwise identical to runtime/runner/sampler_math.cpp.
// The CPU has no kernels: the host sampler reads its rows directly.
#pragma once

#include "device/runtime.hpp"
#include "tensor/tensor.hpp"

namespace llaisys::ops {

// Per sampled row r; all on the device, contiguous.
struct RowAdjustments {
    Tensor rows;            // i32 [n]: row of logits
    Tensor mask_rows;       // i32 [n]: row of masks; -1: all tokens are allowed
    Tensor masks;           // i32 [.., ceil(vocabulary / 32)]: bits
    Tensor bias_offsets;    // i32 [n + 1] into the two below
    Tensor bias_ids;        // i32, ascending in each row; equal ones are added in order
    Tensor bias_values;     // f32
    Tensor history_offsets; // i32 [n + 1] into the two below
    Tensor history_tokens;  // i32, ascending in each row, distinct
    Tensor history_sampled; // i32: how often each was sampled
    Tensor penalties;       // f32 [n, 3]: repetition, presence, frequency
    // Index in `sampled` (i64) of a token that the history lacks: i32 [n]; -1: none. Both are
    // undefined where no row has one.
    Tensor pending_rows, sampled;
};

// out f32 [n, vocabulary] = the rows of logits f32 [.., vocabulary] after mask, bias and penalties.
void adjust_rows(const device::Stream &stream, const Tensor &out, const Tensor &logits,
                 const RowAdjustments &adjustments);
decltype(adjust_rows) adjust_rows_cuda;

// Sum of weights of rows of logits f32 [.., vocabulary], given their k best f32 [.., k], largest
// first: sums i64 [n], the bits of the double that softmax_weights() returns, 0 when all are -inf. rows i32
// [n]; undefined: row r is r. temperatures f32 [n], above 0; undefined: 1. uniforms i64 [n], the
// bits of doubles in [0, 1), with picks i32 [n]: the index of pick(), -1 for none; both are
// undefined if not needed.
void weigh_rows(const device::Stream &stream, const Tensor &sums, const Tensor &picks,
                const Tensor &logits, const Tensor &best, const Tensor &rows,
                const Tensor &temperatures, const Tensor &uniforms);
decltype(weigh_rows) weigh_rows_cuda;

// How a row is sampled from its best candidates: the best one, the index picked by the weights of
// the whole row, or a pick among the candidates that truncating processors leave.
enum class SampleKind : int32_t { best, pick, cut };
enum class LogitsProcessorKind : int32_t { top_k, top_p, min_p, temperature };

// Per sampled row r; all on the device, contiguous.
struct RowSampling {
    Tensor rows;         // i32 [n]: row of the best; not defined: r
    Tensor kinds;        // i32 [n]: SampleKind
    Tensor temperatures; // f32 [n]: above 0
    Tensor uniforms;     // i64 [n]: the bits of doubles in [0, 1)
    Tensor
        processor_offsets; // i32 [n + 1] into the two below; at least one processor where the kind is cut
    Tensor processors;        // i32: LogitsProcessorKind
    Tensor processor_values;  // f32
    bool may_be_wide = false; // the best may not decide a row: top_p or min_p come first
};

// Sample ids i64 [n] from rows of logits f32 [.., vocabulary], their k best, best_ids i32 and best f32
// [.., k], k = min(vocabulary, kMaxTopK), largest first, and the results of weigh_rows, sums i64 [n]
// and picks i32 [n]. is_open i32 [n]: 1 where these do not decide the row, whose id is then the
// best: all logits are -inf, or top_p or min_p keep more than the best and other processors follow.
constexpr int64_t kMaxTopK = 256;
void sample_rows(const device::Stream &stream, const Tensor &ids, const Tensor &is_open,
                 const Tensor &logits, const Tensor &best_ids, const Tensor &best,
                 const Tensor &sums, const Tensor &picks, const RowSampling &samples);
decltype(sample_rows) sample_rows_cuda;

// Logprob inputs of sampled tokens, ids i64 [n] of rows i32 [n] of logits f32 [.., vocabulary] with
// their k best, best_ids i32 and best f32 [.., k].
struct RowRanks {
    Tensor logits;        // f32 [n]: of the sampled tokens
    Tensor ranks;         // i32 [n]: 1 + the number of better ones
    Tensor top_ids, tops; // i32, f32 [n, m]: the best m, at most k
};
void rank_rows(const device::Stream &stream, const RowRanks &out, const Tensor &ids,
               const Tensor &logits, const Tensor &rows, const Tensor &best_ids,
               const Tensor &best);
decltype(rank_rows) rank_rows_cuda;

// For tests: the kernels of the CPU.
void use_row_kernels_on_cpu(decltype(adjust_rows) *adjust, decltype(weigh_rows) *weigh,
                            decltype(sample_rows) *sample, decltype(rank_rows) *rank);

} // namespace llaisys::ops
