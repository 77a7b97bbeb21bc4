#include "runtime/runner/sampler_row.hpp"

#include "runtime/runner/sampler_rng.hpp"

#include <algorithm>
#include <cmath>
#include <limits>
#include <new>

namespace llaisys::runtime {

namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();

template <typename T> void grow(std::vector<T> *values, int64_t n) {
    if (int64_t(values->size()) < n) {
        values->resize(size_t(n));
    }
}

bool has_penalties(const RowParams &params) {
    return params.history != nullptr && !params.history->empty() &&
           (params.repetition != 1 || params.presence != 0 || params.frequency != 0);
}

float penalised(float x, const SamplerHistory::Entry &seen, const RowParams &params) {
    x = x > 0 ? x / params.repetition : x * params.repetition;
    x -= params.frequency * float(seen.drawn);
    return seen.drawn > 0 ? x - params.presence : x;
}

// The weight that weigh() gives a logit.
float weight_of(float logit, float max, float temperature) {
    if (max == kInf) {
        return logit == kInf ? 1.0f : 0.0f;
    }
    return exp_of(temperature == 1.0f ? logit - max : (logit - max) / temperature);
}

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
        for (int32_t link = 0; link < params.n_chain && n_ > 1; ++link) {
            if (!truncates_in_vain(params, link)) {
                apply_link(params.chain[link], params);
            }
        }
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

// What truncation cuts off is never the most likely token, so a truncation does not matter when a
// temperature of 0 takes that token and no penalty changes the order in between.
bool RowSampler::truncates_in_vain(const RowParams &params, int32_t link) const {
    const uint8_t kind = params.chain[link];
    if (params.temperature != 0 || kind == LLAISYS_SAMPLER_PENALTIES ||
        kind == LLAISYS_SAMPLER_TEMPERATURE) {
        return false;
    }
    for (int32_t later = link + 1; later < params.n_chain; ++later) {
        if (params.chain[later] == LLAISYS_SAMPLER_TEMPERATURE) {
            return true;
        }
        if (params.chain[later] == LLAISYS_SAMPLER_PENALTIES && has_penalties(params)) {
            return false;
        }
    }
    return false;
}

void RowSampler::apply_link(uint8_t kind, const RowParams &params) {
    switch (kind) {
    case LLAISYS_SAMPLER_PENALTIES:
        if (has_penalties(params)) {
            apply_penalties(params);
        }
        break;
    case LLAISYS_SAMPLER_TEMPERATURE:
        apply_temperature(params.temperature);
        break;
    case LLAISYS_SAMPLER_TOP_K:
        if (params.top_k > 0 && params.top_k < n_) {
            keep_top_k(params.top_k);
        }
        break;
    case LLAISYS_SAMPLER_TOP_P:
        if (params.top_p < 1) {
            keep_top_p(params.top_p);
        }
        break;
    case LLAISYS_SAMPLER_MIN_P:
        if (params.min_p > 0) {
            keep_min_p(params.min_p);
        }
        break;
    default:
        break; // refused by the checks
    }
}

void RowSampler::apply_penalties(const RowParams &params) {
    make_own();
    if (temperature_ != 1) { // the sign and the size of a logit matter here
        for (int64_t i = 0; i < n_; ++i) {
            own_[size_t(i)] /= temperature_;
        }
        temperature_ = 1;
    }
    if (ids_ == nullptr) {
        for (const SamplerHistory::Entry &seen : *params.history) {
            own_[size_t(seen.token)] = penalised(own_[size_t(seen.token)], seen, params);
        }
        return;
    }
    auto seen = params.history->begin();
    for (int64_t i = 0; i < n_; ++i) { // both are in the order of ids
        while (seen != params.history->end() && seen->token < ids_[i]) {
            ++seen;
        }
        if (seen != params.history->end() && seen->token == ids_[i]) {
            own_[size_t(i)] = penalised(own_[size_t(i)], *seen, params);
        }
    }
}

void RowSampler::apply_temperature(float temperature) {
    if (temperature != 0) {
        temperature_ = temperature;
        return;
    }
    const int64_t best = argmax_of(x_, n_);
    selected_.clear();
    if (best >= 0) {
        selected_.push_back({x_[best], id_of(best)});
    }
    keep_selected();
}

void RowSampler::keep_top_k(int64_t k) {
    select_best(x_, ids_, n_, k, Order::by_id, &selected_);
    keep_selected();
}

void RowSampler::keep_top_p(float top_p) {
    constexpr int64_t kFew = 256; // mostly enough
    const double wanted = double(top_p) * weigh_left();
    const float max = max_of(x_, n_);
    select_best(x_, ids_, n_, kFew, Order::best_first, &selected_);
    double sum = 0;
    size_t n_kept = 0;
    while (n_kept < selected_.size() && (sum < wanted || n_kept == 0)) {
        sum += double(weight_of(selected_[n_kept].logit, max, temperature_));
        ++n_kept;
    }
    if (sum >= wanted || int64_t(selected_.size()) < kFew) {
        selected_.resize(n_kept);
        std::sort(selected_.begin(), selected_.end(),
                  [](const Candidate &a, const Candidate &b) { return a.id < b.id; });
        keep_selected();
        return;
    }
    const Candidate last =
        walk_down(x_, weights_.data(), n_, max, temperature_, wanted, &selected_);
    keep_where(x_, last.logit, [&](int64_t i) { return x_[i] > last.logit || i <= last.id; });
}

void RowSampler::keep_min_p(float min_p) {
    weigh_left();
    keep_where(weights_.data(), min_p, [](int64_t) { return true; });
}

// What is left are the indices with score >= floor for which keep holds. score may be x_.
template <typename Keep>
void RowSampler::keep_where(const float *score, float floor, const Keep &keep) {
    grow(&own_, n_); // neither grows when x_ is in it already
    grow(&own_ids_, n_);
    constexpr int64_t kSkip = 64; // blocks without a survivor are passed over
    int64_t kept = 0;
    for (int64_t begin = 0; begin < n_; begin += kSkip) {
        const int64_t end = std::min(n_, begin + kSkip);
        if (max_of(score + begin, end - begin) < floor) {
            continue;
        }
        for (int64_t i = begin; i < end; ++i) { // in place: kept <= i
            if (score[i] >= floor && keep(i)) {
                own_ids_[size_t(kept)] = id_of(i);
                own_[size_t(kept)] = x_[i];
                ++kept;
            }
        }
    }
    x_ = own_.data();
    ids_ = own_ids_.data();
    n_ = kept;
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
