#include "runtime/runner/sampler_row.hpp"

#include "runtime/runner/sampler_rng.hpp"

#include <algorithm>
#include <cmath>
#include <limits>
#include <new>

namespace llaisys::runtime {

namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();

} // namespace

RowStatus RowSampler::draw(const float *logits, int64_t vocab, const RowParams &params,
                           int32_t *id) noexcept {
    try {
        begin(logits, vocab);
        if (params.mask != nullptr) {
            apply_mask(params.mask);
        }
        if (params.n_bias > 0) {
            apply_bias(params);
        }
        run_chain(params);
        const int64_t index = n_ > 1 ? pick_left(params) : argmax_of(x_, n_);
        if (index < 0) {
            return is_all_nan(logits, vocab) ? RowStatus::all_nan : RowStatus::nothing_left;
        }
        *id = id_of(index);
        return RowStatus::ok;
    } catch (const std::bad_alloc &) {
        return RowStatus::no_memory;
    }
}

void RowSampler::begin(const float *logits, int64_t vocab) {
    x_ = logits;
    ids_ = nullptr;
    n_ = vocab;
    temperature_ = 1;
}

void RowSampler::make_own() {
    if (x_ != own_.data()) {
        grow(&own_, n_);
        std::copy(x_, x_ + n_, own_.begin());
        x_ = own_.data();
    }
}

void RowSampler::apply_mask(const uint32_t *mask) {
    grow(&own_, n_);
    for (int64_t begin = 0; begin < n_; begin += 32) {
        const uint32_t allowed = mask[begin / 32];
        const int64_t end = std::min(n_, begin + 32);
        if (allowed == 0) {
            std::fill(own_.begin() + begin, own_.begin() + end, -kInf);
            continue;
        }
        for (int64_t i = begin; i < end; ++i) {
            own_[size_t(i)] = (allowed >> (i - begin) & 1u) != 0 ? x_[i] : -kInf;
        }
    }
    x_ = own_.data();
}

void RowSampler::apply_bias(const RowParams &params) {
    make_own();
    for (int32_t i = 0; i < params.n_bias; ++i) {
        own_[size_t(params.bias_ids[i])] += params.bias_values[i];
    }
}

void RowSampler::keep_selected() {
    const int64_t n = int64_t(selected_.size());
    grow(&own_, n);
    grow(&own_ids_, n);
    for (int64_t i = 0; i < n; ++i) {
        own_[size_t(i)] = selected_[size_t(i)].logit;
        own_ids_[size_t(i)] = selected_[size_t(i)].id;
    }
    x_ = own_.data();
    ids_ = own_ids_.data();
    n_ = n;
}

int64_t RowSampler::pick_left(const RowParams &params) {
    const double sum = weigh_left();
    const double u = uniform(params.seed, params.choice, params.position);
    return sum > 0 ? pick(weights_.data(), block_sums_.data(), n_, u * sum) : -1;
}

// Fills weights_ and block_sums_; 0 when every logit is -inf.
double RowSampler::weigh_left() {
    grow(&weights_, n_);
    grow(&block_sums_, (n_ + kWeightBlock - 1) / kWeightBlock);
    const float max = max_of(x_, n_);
    if (max == -kInf) {
        std::fill(weights_.begin(), weights_.begin() + n_, 0.0f);
        return 0;
    }
    return weigh(x_, n_, max, temperature_, weights_.data(), block_sums_.data());
}

RowStatus RowSampler::logprobs(const float *logits, int64_t vocab, int32_t drawn, int32_t n,
                               int32_t *ids, float *values, int32_t *count,
                               int32_t *rank) noexcept {
    try {
        begin(logits, vocab);
        const double log_sum = std::log(weigh_left());
        const float max = max_of(x_, n_);
        const auto value_of = [&](float logit) {
            const bool is_top = logit == max; // also when both are +inf
            return float((is_top ? 0.0 : double(logit) - double(max)) - log_sum);
        };
        const float logit = x_[drawn];
        int32_t before = 0;
        for (int64_t i = 0; i < n_; ++i) {
            before += int32_t(x_[i] > logit);
        }
        for (int32_t i = 0; i < drawn; ++i) {
            before += int32_t(x_[i] == logit);
        }
        *rank = before + 1;
        ids[0] = drawn;
        values[0] = value_of(logit);
        selected_.clear();
        if (n > 0) {
            select_best(x_, nullptr, n_, n, Order::best_first, &selected_);
        }
        for (size_t i = 0; i < selected_.size(); ++i) {
            ids[i + 1] = selected_[i].id;
            values[i + 1] = value_of(selected_[i].logit);
        }
        *count = 1 + int32_t(selected_.size());
        return RowStatus::ok;
    } catch (const std::bad_alloc &) {
        return RowStatus::no_memory;
    }
}

} // namespace llaisys::runtime
