// The links of the sampler chain: a sampler is a function here and a row of the table below. The maths
// of each is docs/guides/sampling.md.
#include "runtime/runner/sampler_links.hpp"

#include "runtime/runner/sampler_rng.hpp"

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

float penalised(float x, const SamplerHistory::Entry &entry, const RowParams &params) {
    return sampling::penalised(x, entry.sampled, params.repetition, params.presence,
                               params.frequency);
}

void apply_penalties(Candidates *left, const RowParams &params) {
    float *x = left->own_x();
    if (left->temperature() != 1) { // the sign and the size of a logit matter here
        for (int64_t i = 0; i < left->size(); ++i) {
            x[i] /= left->temperature();
        }
        left->set_temperature(1);
    }
    if (left->ids() == nullptr) {
        for (const SamplerHistory::Entry &entry : *params.history) {
            x[entry.token] = penalised(x[entry.token], entry, params);
        }
        return;
    }
    auto entry = params.history->begin();
    for (int64_t i = 0; i < left->size(); ++i) { // both are in the order of ids
        while (entry != params.history->end() && entry->token < left->id_of(i)) {
            ++entry;
        }
        if (entry != params.history->end() && entry->token == left->id_of(i)) {
            x[i] = penalised(x[i], *entry, params);
        }
    }
}

void apply_temperature(Candidates *left, const RowParams &params) {
    if (params.temperature != 0) {
        left->set_temperature(params.temperature);
        return;
    }
    const int64_t best = argmax_of(left->x(), left->size());
    left->selected().clear();
    if (best >= 0) {
        left->selected().push_back({left->x()[best], left->id_of(best)});
    }
    left->keep_selected();
}

void keep_top_n_sigma(Candidates *left, const RowParams &params) {
    const float *x = left->x();
    const int64_t n = left->size();
    const float max = max_of(x, n);
    if (!std::isfinite(max)) {
        return;
    }
    double count = 0, sum = 0, squares = 0; // of the distances from the best, of logits above -inf
    for (int64_t i = 0; i < n; ++i) {
        if (x[i] > -kInf) {
            const double distance = double(max) - double(x[i]);
            count += 1;
            sum += distance;
            squares += distance * distance;
        }
    }
    const double mean = sum / count;
    const double sigma = std::sqrt(std::max(0.0, squares / count - mean * mean));
    const float floor = float(double(max) - double(params.top_n_sigma) * sigma);
    left->keep_where(x, floor, [](int64_t) { return true; });
}

void keep_top_k(Candidates *left, const RowParams &params) {
    if (params.top_k >= left->size()) {
        return;
    }
    select_best(left->x(), left->ids(), left->size(), params.top_k, Order::by_id,
                &left->selected());
    left->keep_selected();
}

void keep_top_p(Candidates *left, const RowParams &params) {
    const double wanted = double(params.top_p) * left->weigh();
    const float *x = left->x();
    const float max = max_of(x, left->size());
    std::vector<Candidate> &best = left->selected();
    select_best(x, left->ids(), left->size(), kFewBest, Order::best_first, &best);
    double sum = 0;
    size_t n_kept = 0;
    while (n_kept < best.size() && (sum < wanted || n_kept == 0)) {
        sum += double(sampling::weight_of(best[n_kept].logit, max, left->temperature()));
        ++n_kept;
    }
    if (sum >= wanted || int64_t(best.size()) < kFewBest) {
        best.resize(n_kept);
        std::sort(best.begin(), best.end(),
                  [](const Candidate &a, const Candidate &b) { return a.id < b.id; });
        left->keep_selected();
        return;
    }
    const Candidate last =
        walk_down(x, left->weights(), left->size(), max, left->temperature(), wanted, &best);
    left->keep_where(x, last.logit, [&](int64_t i) { return x[i] > last.logit || i <= last.id; });
}

void keep_min_p(Candidates *left, const RowParams &params) {
    left->weigh();
    left->keep_where(left->weights(), params.min_p, [](int64_t) { return true; });
}

void keep_typical(Candidates *left, const RowParams &params) {
    const double sum = left->weigh();
    if (sum == 0) {
        return;
    }
    const float *x = left->x();
    const float *weights = left->weights();
    const int64_t n = left->size();
    const float max = max_of(x, n);
    // Of w = e^y: log p = y - log(sum), so the entropy is log(sum) - sum(w * y) / sum.
    const auto log_weight = [&](int64_t i) {
        return x[i] == max ? 0.0 : double(x[i] - max) / double(left->temperature());
    };
    double mean = 0;
    for (int64_t i = 0; i < n; ++i) {
        if (weights[i] > 0) {
            mean += double(weights[i]) * log_weight(i);
        }
    }
    mean /= sum;
    float *scores = left->scores();
    std::vector<Candidate> &weighing = left->selected();
    weighing.clear();
    for (int64_t i = 0; i < n; ++i) {
        scores[i] = weights[i] > 0 ? -float(std::fabs(log_weight(i) - mean)) : -kInf;
        if (weights[i] > 0) {
            weighing.push_back({scores[i], int32_t(i)});
        }
    }
    // The first sum above typical_p of all, not at it.
    const double wanted = std::nextafter(double(params.typical_p) * sum, double(kInf));
    const Candidate last = walk_down_list(&weighing, weights, wanted);
    left->keep_where(scores, last.logit,
                     [&](int64_t i) { return scores[i] > last.logit || i <= last.id; });
}

void exclude_top(Candidates *left, const RowParams &params) {
    const double u = uniform(params.seed, params.choice, params.position, Purpose::xtc);
    if (u >= double(params.xtc_probability)) {
        return;
    }
    const double floor = double(params.xtc_threshold) * left->weigh();
    const float *x = left->x();
    const float *weights = left->weights();
    const auto is_top = [&](int64_t i) { return weights[i] > 0 && double(weights[i]) >= floor; };
    int64_t last = -1; // the least likely of the top tokens, the highest id among equals
    for (int64_t i = 0; i < left->size(); ++i) {
        if (is_top(i) && (last < 0 || x[i] <= x[last])) {
            last = i;
        }
    }
    if (last >= 0) {
        left->keep_where(x, -kInf, [&](int64_t i) { return i == last || !is_top(i); });
    }
}

struct Link {
    LlaisysSamplerKind kind;
    // Whether the most likely token is still the most likely one, and left, afterwards.
    bool keeps_best;
    // Whether it changes nothing with these parameters, whatever the logits.
    bool (*is_neutral)(const RowParams &params);
    void (*apply)(Candidates *left, const RowParams &params);
};

// In the order of LlaisysSamplerKind.
constexpr Link kLinks[] = {
    {LLAISYS_SAMPLER_PENALTIES, false, [](const RowParams &p) { return !has_penalties(p); },
     apply_penalties},
    {LLAISYS_SAMPLER_TEMPERATURE, true, [](const RowParams &p) { return p.temperature == 1; },
     apply_temperature},
    {LLAISYS_SAMPLER_TOP_K, true, [](const RowParams &p) { return p.top_k == 0; }, keep_top_k},
    {LLAISYS_SAMPLER_TOP_P, true, [](const RowParams &p) { return p.top_p == 1; }, keep_top_p},
    {LLAISYS_SAMPLER_MIN_P, true, [](const RowParams &p) { return p.min_p == 0; }, keep_min_p},
    {LLAISYS_SAMPLER_TYPICAL_P, false, [](const RowParams &p) { return p.typical_p == 1; },
     keep_typical},
    {LLAISYS_SAMPLER_XTC, false,
     [](const RowParams &p) { return p.xtc_probability == 0 || p.xtc_threshold > 0.5f; },
     exclude_top},
    {LLAISYS_SAMPLER_TOP_N_SIGMA, true, [](const RowParams &p) { return p.top_n_sigma == 0; },
     keep_top_n_sigma},
};
static_assert(std::size(kLinks) == LLAISYS_SAMPLER_COUNT);
constexpr bool are_in_order() {
    for (size_t i = 0; i < std::size(kLinks); ++i) {
        if (kLinks[i].kind != LlaisysSamplerKind(i)) {
            return false;
        }
    }
    return true;
}
static_assert(are_in_order());

constexpr uint8_t kDefaultChain[] = {LLAISYS_SAMPLER_PENALTIES,   LLAISYS_SAMPLER_TEMPERATURE,
                                     LLAISYS_SAMPLER_TOP_N_SIGMA, LLAISYS_SAMPLER_TOP_K,
                                     LLAISYS_SAMPLER_TYPICAL_P,   LLAISYS_SAMPLER_TOP_P,
                                     LLAISYS_SAMPLER_MIN_P,       LLAISYS_SAMPLER_XTC};

// Whether the links from `first` on take the most likely token of what is left: a temperature of 0,
// with nothing before it that could change which token that is.
bool takes_best_from(int32_t first, const RowParams &params) {
    for (int32_t i = first; params.temperature == 0 && i < params.n_chain; ++i) {
        const Link &link = kLinks[params.chain[i]];
        if (link.kind == LLAISYS_SAMPLER_TEMPERATURE) {
            return true;
        }
        if (!link.keeps_best && !link.is_neutral(params)) {
            return false;
        }
    }
    return false;
}

} // namespace

Reduction reduction_of(const RowParams &params, int64_t k) {
    Reduction found;
    for (int32_t i = 0; i < params.n_chain; ++i) {
        const Link &link = kLinks[params.chain[i]];
        found.first = i;
        if (link.is_neutral(params)) {
            continue;
        }
        if (takes_best_from(i, params)) {
            found.kind = Reduction::best;
            return found;
        }
        switch (link.kind) {
        case LLAISYS_SAMPLER_PENALTIES: // those of logits as they are were made already
            if (found.temperature != 1) {
                found.kind = Reduction::whole;
                return found;
            }
            found.is_penalised = true;
            continue;
        case LLAISYS_SAMPLER_TEMPERATURE:
            found.temperature = params.temperature;
            continue;
        case LLAISYS_SAMPLER_TOP_K:
            found.kind = params.top_k <= k ? Reduction::top_k : Reduction::whole;
            return found;
        case LLAISYS_SAMPLER_TOP_P:
            found.kind = Reduction::top_p;
            return found;
        case LLAISYS_SAMPLER_MIN_P:
            found.kind = Reduction::min_p;
            return found;
        default:
            found.kind = Reduction::whole;
            return found;
        }
    }
    found.first = params.n_chain;
    found.kind = Reduction::pick;
    return found;
}

bool append_links(const RowParams &params, const Reduction &reduction, std::vector<int32_t> *links,
                  std::vector<float> *values) {
    const auto append = [&](ops::SamplerLink link, float value) {
        links->push_back(int32_t(link));
        values->push_back(value);
    };
    for (int32_t i = reduction.first; i < params.n_chain; ++i) {
        const Link &link = kLinks[params.chain[i]];
        if (link.is_neutral(params)) {
            continue;
        }
        switch (link.kind) {
        case LLAISYS_SAMPLER_TOP_K: // beyond what is left it is all the same
            append(ops::SamplerLink::top_k, float(std::min<int64_t>(params.top_k, 2 * kFewBest)));
            break;
        case LLAISYS_SAMPLER_TOP_P:
            append(ops::SamplerLink::top_p, params.top_p);
            break;
        case LLAISYS_SAMPLER_MIN_P:
            append(ops::SamplerLink::min_p, params.min_p);
            break;
        case LLAISYS_SAMPLER_TEMPERATURE: // 0 takes the best: there are no links then
            append(ops::SamplerLink::temperature, params.temperature);
            break;
        default:
            return false;
        }
    }
    return true;
}

std::pair<const uint8_t *, int32_t> default_chain() {
    return {kDefaultChain, int32_t(std::size(kDefaultChain))};
}

void run_chain(Candidates *left, const RowParams &params, int32_t first) {
    for (int32_t i = first; i < params.n_chain && left->size() > 1; ++i) {
        const Link &link = kLinks[params.chain[i]];
        const bool is_in_vain = link.keeps_best && takes_best_from(i + 1, params);
        if (!link.is_neutral(params) && !is_in_vain) {
            link.apply(left, params);
        }
    }
}

} // namespace llaisys::runtime
