// One row: mask, bias, chain, draw, logprobs. A RowSampler belongs to one thread and keeps its
// scratch from row to row.
#pragma once

#include "runtime/runner/sampler_candidates.hpp"
#include "runtime/runner/sampler_params.hpp"

#include <cstdint>

namespace llaisys::runtime {

enum class RowStatus : uint8_t { ok, nothing_left, all_nan, no_memory };

class RowSampler {
public:
    // Draws one token of logits [vocab]. Never throws.
    RowStatus draw(const float *logits, int64_t vocab, const RowParams &params,
                   int32_t *id) noexcept;

    // The same from the n best of a row, largest first, the lower id first among equals; n is at least
    // best_needed(params), and there is neither mask nor bias. nothing_left also when all are NaN.
    RowStatus draw_best(const int32_t *ids, const float *logits, int64_t n, const RowParams &params,
                        int32_t *id) noexcept;

    // The log-probabilities of logits [vocab]: ids[0] = the drawn token, then up to n best that are
    // above -inf. *count: entries written, at most 1 + n. *rank: 1 + the tokens before it in the
    // order of the best. Never throws.
    RowStatus logprobs(const float *logits, int64_t vocab, int32_t drawn, int32_t n, int32_t *ids,
                       float *values, int32_t *count, int32_t *rank) noexcept;

private:
    Candidates left_;
};

} // namespace llaisys::runtime
