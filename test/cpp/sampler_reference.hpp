// Reference sampler: the documented maths with full sorts, in double. Include once.
#pragma once

#include "runtime/runner/sampler_rng.hpp"
#include "sampler_rows.hpp"

#include <cmath>

namespace sampler_test {

struct Reference {
    std::vector<double> x; // -inf: removed
    std::vector<int32_t> order() const {
        std::vector<int32_t> ids;
        for (size_t i = 0; i < x.size(); ++i) {
            if (x[i] > -std::numeric_limits<double>::infinity()) {
                ids.push_back(int32_t(i));
            }
        }
        std::stable_sort(ids.begin(), ids.end(),
                         [&](int32_t a, int32_t b) { return x[size_t(a)] > x[size_t(b)]; });
        return ids;
    }
    std::vector<double> probabilities() const {
        const double max = *std::max_element(x.begin(), x.end());
        std::vector<double> p;
        double sum = 0;
        for (const double value : x) {
            p.push_back(std::exp(value - max));
            sum += p.back();
        }
        for (double &value : p) {
            value /= sum;
        }
        return p;
    }
    void keep(const std::vector<int32_t> &ids) {
        std::vector<double> kept(x.size(), -std::numeric_limits<double>::infinity());
        for (const int32_t id : ids) {
            kept[size_t(id)] = x[size_t(id)];
        }
        x = kept;
    }
    void apply(uint8_t kind, const Row &row, const std::vector<int64_t> &prompt,
               const std::vector<int64_t> &sampled) {
        std::vector<int32_t> ids = order();
        const std::vector<double> p = probabilities();
        if (kind == kPenalties) {
            for (size_t i = 0; i < x.size(); ++i) {
                const auto n = std::count(sampled.begin(), sampled.end(), int64_t(i));
                if (n > 0 || std::count(prompt.begin(), prompt.end(), int64_t(i)) > 0) {
                    x[i] = x[i] > 0 ? x[i] / double(row.repetition) : x[i] * double(row.repetition);
                }
                x[i] -= double(row.frequency) * double(n) + (n > 0 ? double(row.presence) : 0);
            }
        } else if (kind == kTemperature && row.temperature == 0) {
            keep({ids[0]});
        } else if (kind == kTemperature) {
            double temperature = double(row.temperature);
            if (row.dynatemp_range > 0) {
                const double range = double(row.dynatemp_range);
                double entropy = 0;
                for (const int32_t id : ids) {
                    entropy -= p[size_t(id)] > 0 ? p[size_t(id)] * std::log(p[size_t(id)]) : 0;
                }
                const double share = ids.size() > 1 ? entropy / std::log(double(ids.size())) : 0;
                const double low = std::max(0.0, temperature - range);
                temperature = low + (temperature + range - low) *
                                        std::pow(share, double(row.dynatemp_exponent));
            }
            if (temperature < 1e-30) {
                keep({ids[0]});
                return;
            }
            for (double &value : x) {
                value /= temperature;
            }
        } else if (kind == kTopK && row.top_k > 0 && size_t(row.top_k) < ids.size()) {
            ids.resize(size_t(row.top_k));
            keep(ids);
        } else if (kind == kTopP && row.top_p < 1) {
            double sum = 0;
            size_t n = 0;
            while (n < ids.size() && (n == 0 || sum < double(row.top_p))) {
                sum += p[size_t(ids[n++])];
            }
            ids.resize(n);
            keep(ids);
        } else if (kind == kTypical && row.typical_p < 1) {
            double entropy = 0;
            for (const int32_t id : ids) {
                const double at = p[size_t(id)];
                entropy -= at > 0 ? at * std::log(at) : 0;
            }
            const auto surprise = [&](int32_t id) {
                return std::fabs(-std::log(p[size_t(id)]) - entropy);
            };
            std::sort(ids.begin(), ids.end());
            std::stable_sort(ids.begin(), ids.end(), [&](int32_t a, int32_t b) {
                return surprise(a) < surprise(b) - 1e-12;
            });
            double sum = 0;
            size_t n = 0;
            while (n < ids.size() && sum <= double(row.typical_p)) {
                sum += p[size_t(ids[n++])];
            }
            ids.resize(n);
            keep(ids);
        } else if (kind == kTopSigma && row.top_n_sigma > 0) {
            double mean = 0, variance = 0;
            for (const int32_t id : ids) {
                mean += x[size_t(id)] / double(ids.size());
            }
            for (const int32_t id : ids) {
                variance += std::pow(x[size_t(id)] - mean, 2) / double(ids.size());
            }
            const double floor =
                x[size_t(ids[0])] - double(row.top_n_sigma) * std::sqrt(variance) - 1e-6;
            keep({ids.begin(), std::find_if(ids.begin(), ids.end(),
                                            [&](int32_t id) { return x[size_t(id)] < floor; })});
        } else if (kind == kXtc && row.xtc_threshold <= 0.5f) {
            if (uniform(row.seed, row.choice, row.position, Purpose::xtc) <
                double(row.xtc_probability)) {
                size_t n =
                    0; // removes all tokens at or above the threshold except the least likely
                while (n < ids.size() && p[size_t(ids[n])] >= double(row.xtc_threshold)) {
                    ++n;
                }
                keep({ids.begin() + (n > 1 ? ptrdiff_t(n) - 1 : 0), ids.end()});
            }
        } else if (kind == kMirostat && row.mirostat == 1) {
            double products = 0, squares = 0;
            for (size_t i = 0; i + 1 < std::min<size_t>(ids.size(), 100); ++i) {
                const double t = std::log(double(i + 2) / double(i + 1));
                products += t * std::log(p[size_t(ids[i])] / p[size_t(ids[i + 1])]);
                squares += t * t;
            }
            const double s = products / squares, n = double(x.size());
            const double k = std::pow(
                (s - 1) * std::exp2(double(row.mirostat_mu)) / (1 - std::pow(n, 1 - s)), 1 / s);
            if (ids.size() > 1 && k < n) {
                ids.resize(std::min(ids.size(), std::max(size_t(1), size_t(k))));
                keep(ids);
            }
        } else if (kind == kMirostat && row.mirostat == 2) {
            std::vector<int32_t> kept{ids[0]};
            for (size_t i = 1; i < ids.size(); ++i) {
                const bool is_best = p[size_t(ids[i])] == p[size_t(ids[0])];
                if (is_best || -std::log2(p[size_t(ids[i])]) <= double(row.mirostat_mu)) {
                    kept.push_back(ids[i]);
                }
            }
            keep(kept);
        } else if (kind == kMinP) {
            std::vector<int32_t> kept;
            for (const int32_t id : ids) {
                if (p[size_t(id)] >= double(row.min_p) * p[size_t(ids[0])]) {
                    kept.push_back(id);
                }
            }
            keep(kept);
        }
    }
    // The token at u; *doubtful: u is too close to a boundary.
    int32_t pick(double u, bool *doubtful) const {
        const std::vector<double> p = probabilities();
        double sum = 0;
        int32_t found = -1;
        *doubtful = false;
        for (size_t i = 0; i < p.size(); ++i) {
            sum += p[i];
            *doubtful = *doubtful || (p[i] > 0 && std::fabs(sum - u) < 1e-6);
            if (found < 0 && sum > u) {
                found = int32_t(i);
            }
        }
        return found;
    }
};

inline Reference reference_of(const float *logits, int64_t vocab, const Row &row,
                              const std::vector<int64_t> &prompt,
                              const std::vector<int64_t> &sampled,
                              const std::vector<uint32_t> &masks) {
    Reference reference;
    for (int64_t i = 0; i < vocab; ++i) {
        const bool allowed =
            row.mask < 0 ||
            (masks[size_t(row.mask * ((vocab + 31) / 32) + i / 32)] >> (i % 32) & 1u) != 0;
        reference.x.push_back(allowed && !std::isnan(logits[i])
                                  ? double(logits[i])
                                  : -std::numeric_limits<double>::infinity());
    }
    for (const auto &entry : row.bias) {
        reference.x[size_t(entry.first)] += double(entry.second);
    }
    for (const uint8_t kind : row.chain) {
        reference.apply(kind, row, prompt, sampled);
    }
    return reference;
}

} // namespace sampler_test
