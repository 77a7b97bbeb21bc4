// The logits processors of the sampler chain: each is a function and a row of the table below. The
// maths is in docs/guides/sampling.md.
#include "runtime/runner/sampler_chain.hpp"

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

void apply_penalties(Candidates *candidates, const RowParams &params) {
    float *x = candidates->mutable_x();
    if (candidates->temperature() != 1) { // penalties depend on the sign and size of a logit
        for (int64_t i = 0; i < candidates->size(); ++i) {
            x[i] /= candidates->temperature();
        }
        candidates->set_temperature(1);
    }
    if (candidates->ids() == nullptr) {
        for (const SamplerHistory::Entry &entry : *params.history) {
            x[entry.token] = penalised(x[entry.token], entry, params);
        }
        return;
    }
    auto entry = params.history->begin();
    for (int64_t i = 0; i < candidates->size(); ++i) { // both are sorted by id
        while (entry != params.history->end() && entry->token < candidates->id_of(i)) {
            ++entry;
        }
        if (entry != params.history->end() && entry->token == candidates->id_of(i)) {
            x[i] = penalised(x[i], *entry, params);
        }
    }
}

// Log-probability of a candidate plus a constant: with w = e^y, the y of its weight.
double log_weight(const Candidates &candidates, int64_t i, float max) {
    const float x = candidates.x()[i];
    return x == max ? 0.0 : double(x - max) / double(candidates.temperature());
}

// The mean of log_weight over the distribution of the candidates, whose weights are computed.
double mean_log_weight(const Candidates &candidates, float max, double sum) {
    double mean = 0;
    for (int64_t i = 0; i < candidates.size(); ++i) {
        if (candidates.weights()[i] > 0) {
            mean += double(candidates.weights()[i]) * log_weight(candidates, i, max);
        }
    }
    return mean / sum;
}

// Dynamic temperature: between temperature -/+ range by the entropy of the candidates.
float dynamic_temperature(Candidates *candidates, const RowParams &params) {
    const double low = std::max(0.0, double(params.temperature) - double(params.dynatemp_range));
    const double high = double(params.temperature) + double(params.dynatemp_range);
    const double sum = candidates->compute_weights();
    int64_t n = 0;
    for (int64_t i = 0; i < candidates->size(); ++i) {
        n += int64_t(candidates->x()[i] > -kInf);
    }
    double share = 0; // of the largest possible entropy
    if (sum > 0 && n > 1) {
        const float max = max_of(candidates->x(), candidates->size());
        const double entropy = std::log(sum) - mean_log_weight(*candidates, max, sum);
        share = std::min(1.0, std::max(0.0, entropy / std::log(double(n))));
    }
    return float(low + (high - low) * std::pow(share, double(params.dynatemp_exponent)));
}

void apply_temperature(Candidates *candidates, const RowParams &params) {
    float temperature = params.temperature;
    if (temperature != 0 && params.dynatemp_range > 0) {
        temperature = dynamic_temperature(candidates, params);
    }
    if (temperature != 0) {
        candidates->set_temperature(temperature);
        return;
    }
    const int64_t best = argmax_of(candidates->x(), candidates->size());
    candidates->selected().clear();
    if (best >= 0) {
        candidates->selected().push_back({candidates->x()[best], candidates->id_of(best)});
    }
    candidates->keep_selected();
}

void keep_top_n_sigma(Candidates *candidates, const RowParams &params) {
    const float *x = candidates->x();
    const int64_t n = candidates->size();
    const float max = max_of(x, n);
    if (!std::isfinite(max)) {
        return;
    }
    double count = 0, sum = 0, squares = 0; // distances from the largest, of logits above -inf
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
    candidates->keep_where(x, floor, [](int64_t) { return true; });
}

void keep_top_k(Candidates *candidates, const RowParams &params) {
    if (params.top_k >= candidates->size()) {
        return;
    }
    select_best(candidates->x(), candidates->ids(), candidates->size(), params.top_k, Order::by_id,
                &candidates->selected());
    candidates->keep_selected();
}

void keep_top_p(Candidates *candidates, const RowParams &params) {
    const double target = double(params.top_p) * candidates->compute_weights();
    const float *x = candidates->x();
    const float max = max_of(x, candidates->size());
    std::vector<Candidate> &best = candidates->selected();
    select_best(x, candidates->ids(), candidates->size(), kMaxTopK, Order::best_first, &best);
    double sum = 0;
    size_t n_kept = 0;
    while (n_kept < best.size() && (sum < target || n_kept == 0)) {
        sum += double(sampling::weight_of(best[n_kept].logit, max, candidates->temperature()));
        ++n_kept;
    }
    if (sum >= target || int64_t(best.size()) < kMaxTopK) {
        best.resize(n_kept);
        std::sort(best.begin(), best.end(),
                  [](const Candidate &a, const Candidate &b) { return a.id < b.id; });
        candidates->keep_selected();
        return;
    }
    const Candidate last = find_cutoff(x, candidates->weights(), candidates->size(), max,
                                       candidates->temperature(), target, &best);
    candidates->keep_where(x, last.logit,
                           [&](int64_t i) { return x[i] > last.logit || i <= last.id; });
}

void keep_min_p(Candidates *candidates, const RowParams &params) {
    candidates->compute_weights();
    candidates->keep_where(candidates->weights(), params.min_p, [](int64_t) { return true; });
}

void keep_typical(Candidates *candidates, const RowParams &params) {
    const double sum = candidates->compute_weights();
    if (sum == 0) {
        return;
    }
    const float *x = candidates->x();
    const float *weights = candidates->weights();
    const int64_t n = candidates->size();
    const float max = max_of(x, n);
    // With w = e^y: log p = y - log(sum), so the entropy is log(sum) - mean y.
    const double mean = mean_log_weight(*candidates, max, sum);
    float *scores = candidates->scores();
    std::vector<Candidate> &weighted = candidates->selected();
    weighted.clear();
    for (int64_t i = 0; i < n; ++i) {
        scores[i] =
            weights[i] > 0 ? -float(std::fabs(log_weight(*candidates, i, max) - mean)) : -kInf;
        if (weights[i] > 0) {
            weighted.push_back({scores[i], int32_t(i)});
        }
    }
    // The first sum strictly above typical_p * sum.
    const double target = std::nextafter(double(params.typical_p) * sum, double(kInf));
    const Candidate last = find_cutoff_in(&weighted, weights, target);
    candidates->keep_where(scores, last.logit,
                           [&](int64_t i) { return scores[i] > last.logit || i <= last.id; });
}

void exclude_top(Candidates *candidates, const RowParams &params) {
    const double u = uniform(params.seed, params.choice, params.position, Purpose::xtc);
    if (u >= double(params.xtc_probability)) {
        return;
    }
    const double floor = double(params.xtc_threshold) * candidates->compute_weights();
    const float *x = candidates->x();
    const float *weights = candidates->weights();
    const auto is_top = [&](int64_t i) { return weights[i] > 0 && double(weights[i]) >= floor; };
    int64_t last = -1; // the least likely of the top tokens, the highest id among equals
    for (int64_t i = 0; i < candidates->size(); ++i) {
        if (is_top(i) && (last < 0 || x[i] <= x[last])) {
            last = i;
        }
    }
    if (last >= 0) {
        candidates->keep_where(x, -kInf, [&](int64_t i) { return i == last || !is_top(i); });
    }
}

// Mirostat 1: estimates the exponent of a Zipf distribution from the best tokens, and keeps as many
// of the best as give the surprise mu.
void keep_mirostat(Candidates *candidates, const RowParams &params) {
    constexpr int64_t kEstimated = 100;
    std::vector<Candidate> &best = candidates->selected();
    select_best(candidates->x(), candidates->ids(), candidates->size(), kEstimated,
                Order::best_first, &best);
    double products = 0, squares = 0;
    for (size_t i = 0; i + 1 < best.size(); ++i) {
        const double distance = std::log(double(i + 2) / double(i + 1));
        const double ratio = double(best[i].logit - best[i + 1].logit);
        products += distance * ratio / double(candidates->temperature());
        squares += distance * distance;
    }
    if (!(squares > 0) || !std::isfinite(products)) {
        return;
    }
    const double exponent = products / squares;
    const double epsilon = exponent - 1, n = double(candidates->size());
    const double ratio =
        std::fabs(epsilon) < 1e-9 ? 1 / std::log(n) : epsilon / (1 - std::pow(n, -epsilon));
    const double k = std::pow(ratio * std::exp2(double(params.mirostat_mu)), 1 / exponent);
    if (!(k < n)) { // also with an exponent of 0: equal logits
        return;
    }
    select_best(candidates->x(), candidates->ids(), candidates->size(),
                std::max(int64_t(1), int64_t(k)), Order::by_id, &best);
    candidates->keep_selected();
}

// Keeps the tokens whose surprise, -log2 p, is at most mu (Basu et al., "Mirostat", ICLR 2021).
void apply_mirostat(Candidates *candidates, const RowParams &params) {
    if (params.mirostat == 1) {
        keep_mirostat(candidates, params);
        return;
    }
    const double floor = candidates->compute_weights() * std::exp2(-double(params.mirostat_mu));
    candidates->keep_where(candidates->weights(), float(std::min(1.0, floor)), // the best: 1
                           [](int64_t) { return true; });
}

struct LogitsProcessor {
    LlaisysSamplerKind kind;
    // Whether the most likely token stays the most likely one.
    bool keeps_best;
    // Whether it changes nothing with these parameters for any logits.
    bool (*is_neutral)(const RowParams &params);
    void (*apply)(Candidates *candidates, const RowParams &params);
};

// In the order of LlaisysSamplerKind.
constexpr LogitsProcessor kProcessors[] = {
    {LLAISYS_SAMPLER_PENALTIES, false, [](const RowParams &p) { return !has_penalties(p); },
     apply_penalties},
    {LLAISYS_SAMPLER_TEMPERATURE, true,
     [](const RowParams &p) { return p.temperature == 1 && p.dynatemp_range == 0; },
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
    {LLAISYS_SAMPLER_MIROSTAT, true, [](const RowParams &p) { return p.mirostat == 0; },
     apply_mirostat},
};
static_assert(std::size(kProcessors) == LLAISYS_SAMPLER_COUNT);
constexpr bool are_in_order() {
    for (size_t i = 0; i < std::size(kProcessors); ++i) {
        if (kProcessors[i].kind != LlaisysSamplerKind(i)) {
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

// Whether the processors from `first` on select the most likely token: temperature 0, and no
// earlier processor that could change which token that is.
bool is_greedy_from(int32_t first, const RowParams &params) {
    for (int32_t i = first; params.temperature == 0 && i < params.n_chain; ++i) {
        const LogitsProcessor &processor = kProcessors[params.chain[i]];
        if (processor.kind == LLAISYS_SAMPLER_TEMPERATURE) {
            return true;
        }
        if (!processor.keeps_best && !processor.is_neutral(params)) {
            return false;
        }
    }
    return false;
}

} // namespace

Reduction reduction_of(const RowParams &params, int64_t k) {
    Reduction found;
    const auto reduced_to = [&found](Reduction::Kind kind) {
        found.kind = kind;
        return found;
    };
    if (params.post_sampling_probs != 0) { // the whole distribution after the chain
        return found;
    }
    for (int32_t i = 0; i < params.n_chain; ++i) {
        const LogitsProcessor &processor = kProcessors[params.chain[i]];
        found.first = i;
        if (processor.is_neutral(params)) {
            continue;
        }
        if (is_greedy_from(i, params)) {
            return reduced_to(Reduction::best);
        }
        switch (processor.kind) {
        case LLAISYS_SAMPLER_PENALTIES: // applied before the reduction, at temperature 1 only
            if (found.temperature != 1) {
                return reduced_to(Reduction::full_row);
            }
            found.is_penalised = true;
            continue;
        case LLAISYS_SAMPLER_TEMPERATURE:
            if (params.dynatemp_range > 0) {
                return reduced_to(Reduction::full_row);
            }
            found.temperature = params.temperature;
            continue;
        case LLAISYS_SAMPLER_TOP_K:
            return reduced_to(params.top_k <= k ? Reduction::top_k : Reduction::full_row);
        case LLAISYS_SAMPLER_TOP_P:
            return reduced_to(Reduction::top_p);
        case LLAISYS_SAMPLER_MIN_P:
            return reduced_to(Reduction::min_p);
        default:
            return reduced_to(Reduction::full_row);
        }
    }
    found.first = params.n_chain;
    return reduced_to(Reduction::pick);
}

bool append_processors(const RowParams &params, const Reduction &reduction,
                       std::vector<int32_t> *processors, std::vector<float> *values) {
    const auto append = [&](ops::LogitsProcessorKind processor, float value) {
        processors->push_back(int32_t(processor));
        values->push_back(value);
    };
    for (int32_t i = reduction.first; i < params.n_chain; ++i) {
        const LogitsProcessor &processor = kProcessors[params.chain[i]];
        if (processor.is_neutral(params)) {
            continue;
        }
        switch (processor.kind) {
        case LLAISYS_SAMPLER_TOP_K: // larger values have no effect
            append(ops::LogitsProcessorKind::top_k,
                   float(std::min<int64_t>(params.top_k, 2 * kMaxTopK)));
            break;
        case LLAISYS_SAMPLER_TOP_P:
            append(ops::LogitsProcessorKind::top_p, params.top_p);
            break;
        case LLAISYS_SAMPLER_MIN_P:
            append(ops::LogitsProcessorKind::min_p, params.min_p);
            break;
        case LLAISYS_SAMPLER_TEMPERATURE: // 0 is greedy, which has no processors
            if (params.dynatemp_range > 0) {
                return false;
            }
            append(ops::LogitsProcessorKind::temperature, params.temperature);
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

void run_chain(Candidates *candidates, const RowParams &params) {
    for (int32_t i = 0; i < params.n_chain && candidates->size() > 1; ++i) {
        const LogitsProcessor &processor = kProcessors[params.chain[i]];
        const bool is_redundant = processor.keeps_best && is_greedy_from(i + 1, params);
        if (!processor.is_neutral(params) && !is_redundant) {
            processor.apply(candidates, params);
        }
    }
}

} // namespace llaisys::runtime
