// The links of the sampler chain: a sampler is a row of its table and its function. The maths of each
// is docs/sampling.md.
#include "runtime/runner/sampler_rng.hpp"
#include "runtime/runner/sampler_row.hpp"

#include <algorithm>
#include <cmath>
#include <iterator>
#include <limits>

namespace llaisys::runtime {

namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();

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

struct RowSampler::Link {
    LlaisysSamplerKind kind;
    // Whether the most likely token is still the most likely one, and left, afterwards.
    bool keeps_best;
    // Whether it changes nothing with these parameters, whatever the logits.
    bool (*is_neutral)(const RowParams &params);
    void (RowSampler::*apply)(const RowParams &params);
};

const RowSampler::Link &RowSampler::link_of(uint8_t kind) {
    static constexpr Link kLinks[] = {
        {LLAISYS_SAMPLER_PENALTIES, false, [](const RowParams &p) { return !has_penalties(p); },
         &RowSampler::apply_penalties},
        {LLAISYS_SAMPLER_TEMPERATURE, true, [](const RowParams &p) { return p.temperature == 1; },
         &RowSampler::apply_temperature},
        {LLAISYS_SAMPLER_TOP_K, true, [](const RowParams &p) { return p.top_k == 0; },
         &RowSampler::keep_top_k},
        {LLAISYS_SAMPLER_TOP_P, true, [](const RowParams &p) { return p.top_p == 1; },
         &RowSampler::keep_top_p},
        {LLAISYS_SAMPLER_MIN_P, true, [](const RowParams &p) { return p.min_p == 0; },
         &RowSampler::keep_min_p},
        {LLAISYS_SAMPLER_TYPICAL_P, false, [](const RowParams &p) { return p.typical_p == 1; },
         &RowSampler::keep_typical},
        {LLAISYS_SAMPLER_XTC, false,
         [](const RowParams &p) { return p.xtc_probability == 0 || p.xtc_threshold > 0.5f; },
         &RowSampler::exclude_top},
    };
    static_assert(std::size(kLinks) == LLAISYS_SAMPLER_COUNT);
    return kLinks[kind]; // in the order of LlaisysSamplerKind
}

// With a temperature of 0 a link that keeps the most likely token does not matter when everything
// between it and the temperature keeps that token too.
bool RowSampler::is_in_vain(const RowParams &params, int32_t i) {
    if (params.temperature != 0 || !link_of(params.chain[i]).keeps_best) {
        return false;
    }
    for (int32_t later = i + 1; later < params.n_chain; ++later) {
        const Link &link = link_of(params.chain[later]);
        if (link.kind == LLAISYS_SAMPLER_TEMPERATURE) {
            return true;
        }
        if (!link.keeps_best && !link.is_neutral(params)) {
            return false;
        }
    }
    return false;
}

void RowSampler::run_chain(const RowParams &params) {
    for (int32_t i = 0; i < params.n_chain && n_ > 1; ++i) {
        const Link &link = link_of(params.chain[i]);
        if (!link.is_neutral(params) && !is_in_vain(params, i)) {
            (this->*link.apply)(params);
        }
    }
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

void RowSampler::apply_temperature(const RowParams &params) {
    if (params.temperature != 0) {
        temperature_ = params.temperature;
        return;
    }
    const int64_t best = argmax_of(x_, n_);
    selected_.clear();
    if (best >= 0) {
        selected_.push_back({x_[best], id_of(best)});
    }
    keep_selected();
}

void RowSampler::keep_top_k(const RowParams &params) {
    if (params.top_k >= n_) {
        return;
    }
    select_best(x_, ids_, n_, params.top_k, Order::by_id, &selected_);
    keep_selected();
}

void RowSampler::keep_top_p(const RowParams &params) {
    constexpr int64_t kFew = 256; // mostly enough
    const double wanted = double(params.top_p) * weigh_left();
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

void RowSampler::keep_min_p(const RowParams &params) {
    weigh_left();
    keep_where(weights_.data(), params.min_p, [](int64_t) { return true; });
}

void RowSampler::keep_typical(const RowParams &params) {
    const double sum = weigh_left();
    if (sum == 0) {
        return;
    }
    const float max = max_of(x_, n_);
    // Of w = e^y: log p = y - log(sum), so the entropy is log(sum) - sum(w * y) / sum.
    const auto log_weight = [&](int64_t i) {
        return x_[i] == max ? 0.0 : double(x_[i] - max) / double(temperature_);
    };
    double mean = 0;
    for (int64_t i = 0; i < n_; ++i) {
        if (weights_[size_t(i)] > 0) {
            mean += double(weights_[size_t(i)]) * log_weight(i);
        }
    }
    mean /= sum;
    grow(&scores_, n_);
    selected_.clear();
    for (int64_t i = 0; i < n_; ++i) {
        const bool weighs = weights_[size_t(i)] > 0;
        scores_[size_t(i)] = weighs ? -float(std::fabs(log_weight(i) - mean)) : -kInf;
        if (weighs) {
            selected_.push_back({scores_[size_t(i)], int32_t(i)});
        }
    }
    // The first sum above typical_p of all, not at it.
    const double wanted = std::nextafter(double(params.typical_p) * sum, double(kInf));
    const Candidate last = walk_down_list(&selected_, weights_.data(), wanted);
    keep_where(scores_.data(), last.logit,
               [&](int64_t i) { return scores_[size_t(i)] > last.logit || i <= last.id; });
}

void RowSampler::exclude_top(const RowParams &params) {
    const double u = uniform(params.seed, params.choice, params.position, Purpose::xtc);
    if (u >= double(params.xtc_probability)) {
        return;
    }
    const double floor = double(params.xtc_threshold) * weigh_left();
    const auto is_top = [&](int64_t i) {
        return weights_[size_t(i)] > 0 && double(weights_[size_t(i)]) >= floor;
    };
    int64_t last = -1; // the least likely of the top tokens, the highest id among equals
    for (int64_t i = 0; i < n_; ++i) {
        if (is_top(i) && (last < 0 || x_[i] <= x_[last])) {
            last = i;
        }
    }
    if (last >= 0) {
        keep_where(x_, -kInf, [&](int64_t i) { return i == last || !is_top(i); });
    }
}

} // namespace llaisys::runtime
