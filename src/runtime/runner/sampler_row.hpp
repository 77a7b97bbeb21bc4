// Samples one row: mask, bias, chain, pick, logprobs. A RowSampler is used by one thread and reuses
// its scratch.
#pragma once

#include "runtime/runner/sampler_candidates.hpp"
#include "runtime/runner/sampler_params.hpp"

#include <cstdint>

namespace llaisys::runtime {

enum class RowStatus : uint8_t { ok, nothing_left, all_nan, no_memory };

// The top k of a row of logits, largest first, lower id first on ties; NaN is -inf.
struct BestLogits {
    const int32_t *ids;
    const float *logits;
    int64_t k;
};

class RowSampler {
public:
    // Samples one token from logits [vocab].
    RowStatus sample(const float *logits, int64_t vocab, const RowParams &params,
                     int32_t *id) noexcept;

    // Makes logprobs() return those of logits [vocab], not those that sample() chose from.
    void begin_logprobs(const float *logits, int64_t vocab) { candidates_.begin(logits, vocab); }
    // Log-probabilities of the remaining tokens: ids[0] = the sampled token, then up to n best
    // above -inf. *count: entries written, at most 1 + n. *rank: of the sampled token, from 1.
    RowStatus logprobs(int32_t sampled, int32_t n, int32_t *ids, float *values, int32_t *count,
                       int32_t *rank) noexcept;
    // The same of a row from its top k, k >= n, the sum of its weights and the logit of the sampled
    // token; returns the count.
    static int32_t logprobs_of_sampled(const BestLogits &best, double sum, int32_t sampled,
                                       float logit, int32_t n, int32_t *ids,
                                       float *values) noexcept;

private:
    Candidates candidates_;
};

} // namespace llaisys::runtime
