#include "runtime/runner/sampler_row.hpp"

#include "runtime/runner/sampler_chain.hpp"
#include "runtime/runner/sampler_rng.hpp"

#include <algorithm>
#include <cmath>
#include <limits>
#include <new>

namespace llaisys::runtime {

namespace {

void apply_bias(Candidates *candidates, const RowParams &params) {
    float *x = candidates->mutable_x();
    for (int32_t i = 0; i < params.n_bias; ++i) {
        x[params.bias_ids[i]] += params.bias_values[i];
    }
}

// The index of the sampled candidate; -1 when every logit is -inf.
int64_t pick_of(Candidates *candidates, const RowParams &params) {
    if (candidates->size() <= 1) {
        return argmax_of(candidates->x(), candidates->size());
    }
    const double sum = candidates->compute_weights();
    const double u = uniform(params.seed, params.choice, params.position);
    return sum > 0
               ? pick(candidates->weights(), candidates->block_sums(), candidates->size(), u * sum)
               : -1;
}

// The number of best logits above -inf.
int64_t n_above(const BestLogits &best) {
    int64_t n = best.k;
    while (n > 0 && !(best.logits[n - 1] > -std::numeric_limits<float>::infinity())) {
        --n;
    }
    return n;
}

// Log-probability of a logit, from the largest logit and the logarithm of the sum of weights.
float logprob_of(float logit, float max, double log_sum, float temperature = 1) {
    const bool is_top = logit == max; // also when both are +inf
    return float((is_top ? 0.0 : (double(logit) - double(max)) / double(temperature)) - log_sum);
}

} // namespace

RowStatus RowSampler::sample(const float *logits, int64_t vocab, const RowParams &params,
                             int32_t *id) noexcept {
    try {
        candidates_.begin(logits, vocab);
        if (params.mask != nullptr) {
            candidates_.apply_mask(params.mask);
        }
        if (params.n_bias > 0) {
            apply_bias(&candidates_, params);
        }
        run_chain(&candidates_, params);
        const int64_t index = pick_of(&candidates_, params);
        if (index < 0) {
            return is_all_nan(logits, vocab) ? RowStatus::all_nan : RowStatus::nothing_left;
        }
        *id = candidates_.id_of(index);
        return RowStatus::ok;
    } catch (const std::bad_alloc &) {
        return RowStatus::no_memory;
    }
}

RowStatus RowSampler::logprobs(int32_t sampled, int32_t n, int32_t *ids, float *values,
                               int32_t *count, int32_t *rank) noexcept {
    try {
        const float *logits = candidates_.x();
        const int64_t size = candidates_.size();
        const double log_sum = std::log(candidates_.compute_weights());
        const float max = max_of(logits, size), temperature = candidates_.temperature();
        const auto value_of = [&](float logit) {
            return logprob_of(logit, max, log_sum, temperature);
        };
        const int32_t *known = candidates_.ids();
        const int64_t index =
            known == nullptr ? sampled : std::lower_bound(known, known + size, sampled) - known;
        const float logit = logits[index];
        int32_t before = 0;
        for (int64_t i = 0; i < size; ++i) {
            before += int32_t(logits[i] > logit);
        }
        for (int64_t i = 0; i < index; ++i) {
            before += int32_t(logits[i] == logit);
        }
        *rank = before + 1;
        ids[0] = sampled;
        values[0] = value_of(logit);
        std::vector<Candidate> &best = candidates_.selected();
        best.clear();
        if (n > 0) {
            select_best(logits, known, size, n, Order::best_first, &best);
        }
        for (size_t i = 0; i < best.size(); ++i) {
            ids[i + 1] = best[i].id;
            values[i + 1] = value_of(best[i].logit);
        }
        *count = 1 + int32_t(best.size());
        return RowStatus::ok;
    } catch (const std::bad_alloc &) {
        return RowStatus::no_memory;
    }
}

int32_t RowSampler::logprobs_of_sampled(const BestLogits &best, double sum, int32_t sampled,
                                        float logit, int32_t n, int32_t *ids,
                                        float *values) noexcept {
    const double log_sum = std::log(sum);
    const int64_t n_best = std::min<int64_t>(n, n_above(best));
    ids[0] = sampled;
    values[0] = logprob_of(logit, best.logits[0], log_sum);
    for (int64_t i = 0; i < n_best; ++i) {
        ids[i + 1] = best.ids[i];
        values[i + 1] = logprob_of(best.logits[i], best.logits[0], log_sum);
    }
    return int32_t(1 + n_best);
}

} // namespace llaisys::runtime
