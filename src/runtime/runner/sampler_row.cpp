#include "runtime/runner/sampler_row.hpp"

#include "runtime/runner/sampler_links.hpp"
#include "runtime/runner/sampler_rng.hpp"

#include <cmath>
#include <new>

namespace llaisys::runtime {

namespace {

void apply_bias(Candidates *left, const RowParams &params) {
    float *x = left->own_x();
    for (int32_t i = 0; i < params.n_bias; ++i) {
        x[params.bias_ids[i]] += params.bias_values[i];
    }
}

// The index of the drawn token in what is left; -1 when every logit is -inf.
int64_t pick_of(Candidates *left, const RowParams &params) {
    if (left->size() <= 1) {
        return argmax_of(left->x(), left->size());
    }
    const double sum = left->weigh();
    const double u = uniform(params.seed, params.choice, params.position);
    return sum > 0 ? pick(left->weights(), left->block_sums(), left->size(), u * sum) : -1;
}

} // namespace

RowStatus RowSampler::draw(const float *logits, int64_t vocab, const RowParams &params,
                           int32_t *id) noexcept {
    try {
        left_.begin(logits, vocab);
        if (params.mask != nullptr) {
            left_.apply_mask(params.mask);
        }
        if (params.n_bias > 0) {
            apply_bias(&left_, params);
        }
        run_chain(&left_, params);
        const int64_t index = pick_of(&left_, params);
        if (index < 0) {
            return is_all_nan(logits, vocab) ? RowStatus::all_nan : RowStatus::nothing_left;
        }
        *id = left_.id_of(index);
        return RowStatus::ok;
    } catch (const std::bad_alloc &) {
        return RowStatus::no_memory;
    }
}

RowStatus RowSampler::draw_best(const int32_t *ids, const float *logits, int64_t n,
                                const RowParams &params, int32_t *id) noexcept {
    try {
        left_.begin_best(ids, logits, n);
        run_chain(&left_, params);
        const int64_t index = pick_of(&left_, params);
        if (index < 0) {
            return RowStatus::nothing_left;
        }
        *id = left_.id_of(index);
        return RowStatus::ok;
    } catch (const std::bad_alloc &) {
        return RowStatus::no_memory;
    }
}

RowStatus RowSampler::logprobs(const float *logits, int64_t vocab, int32_t drawn, int32_t n,
                               int32_t *ids, float *values, int32_t *count,
                               int32_t *rank) noexcept {
    try {
        left_.begin(logits, vocab);
        const double log_sum = std::log(left_.weigh());
        const float max = max_of(logits, vocab);
        const auto value_of = [&](float logit) {
            const bool is_top = logit == max; // also when both are +inf
            return float((is_top ? 0.0 : double(logit) - double(max)) - log_sum);
        };
        const float logit = logits[drawn];
        int32_t before = 0;
        for (int64_t i = 0; i < vocab; ++i) {
            before += int32_t(logits[i] > logit);
        }
        for (int32_t i = 0; i < drawn; ++i) {
            before += int32_t(logits[i] == logit);
        }
        *rank = before + 1;
        ids[0] = drawn;
        values[0] = value_of(logit);
        std::vector<Candidate> &best = left_.selected();
        best.clear();
        if (n > 0) {
            select_best(logits, nullptr, vocab, n, Order::best_first, &best);
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

} // namespace llaisys::runtime
