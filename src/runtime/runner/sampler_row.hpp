// One row: mask, bias, chain, sample, logprobs. A RowSampler belongs to one thread and keeps its
// scratch from row to row.
#pragma once

#include "runtime/runner/sampler_candidates.hpp"
#include "runtime/runner/sampler_params.hpp"

#include <cstdint>

namespace llaisys::runtime {

// needs_all: cannot be sampled from what is known of it; the whole row is needed.
enum class RowStatus : uint8_t { ok, nothing_left, all_nan, no_memory, needs_all };

// The k best of a row of `vocab` logits, largest first, the lower id first among equals; NaN is -inf.
struct BestLogits {
    const int32_t *ids;
    const float *logits;
    int64_t k, vocab;
};

class RowSampler {
public:
    // Samples one token of logits [vocab]. Never throws.
    RowStatus sample(const float *logits, int64_t vocab, const RowParams &params,
                     int32_t *id) noexcept;

    // The same from the best of a row after mask, bias and penalties, the sum of its weights and the
    // index that these pick, at the temperature of reduction_of(params). needs_all where that is not
    // enough, or where sample would fail.
    RowStatus sample_reduced(const BestLogits &best, double sum, int32_t pick,
                             const RowParams &params, int32_t *id) noexcept;

    // The log-probabilities of logits [vocab]: ids[0] = the sampled token, then up to n best that are
    // above -inf. *count: entries written, at most 1 + n. *rank: 1 + the tokens before it in the
    // order of the best. Never throws.
    RowStatus logprobs(const float *logits, int64_t vocab, int32_t sampled, int32_t n, int32_t *ids,
                       float *values, int32_t *count, int32_t *rank) noexcept;
    // The same from the best of the row, at least n of them, and the sum of its weights. needs_all
    // where the sampled token is not among them.
    static RowStatus logprobs_of_best(const BestLogits &best, double sum, int32_t sampled,
                                      int32_t n, int32_t *ids, float *values, int32_t *count,
                                      int32_t *rank) noexcept;
    // The same of a sampled token whose logit is known; returns the count.
    static int32_t logprobs_of_sampled(const BestLogits &best, double sum, int32_t sampled,
                                       float logit, int32_t n, int32_t *ids,
                                       float *values) noexcept;

private:
    Candidates left_;
};

} // namespace llaisys::runtime
