// The operators of ops/sample_rows in plain loops, on the CPU: including this header installs them.
#pragma once

#include "base/sampling.hpp"
#include "ops/sample_rows/op.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

namespace sample_rows_reference {

using namespace llaisys;
using namespace llaisys::ops;

inline double double_of(int64_t bits) {
    double value = 0;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}

// Of at most one block of weights.
inline double sum_block(const float *weights, int64_t n) {
    double lanes[sampling::kLanes] = {};
    for (int64_t i = 0; i < n; ++i) {
        lanes[i % sampling::kLanes] += double(weights[i]);
    }
    return ((lanes[0] + lanes[4]) + (lanes[2] + lanes[6])) +
           ((lanes[1] + lanes[5]) + (lanes[3] + lanes[7]));
}

struct Weighed {
    std::vector<float> weights;
    std::vector<double> blocks;
    double sum = 0;
};

inline Weighed weigh(const float *x, int64_t n, float max, float temperature) {
    Weighed found;
    for (int64_t i = 0; i < n; ++i) {
        found.weights.push_back(sampling::weight_of(x[i], max, temperature));
    }
    for (int64_t begin = 0; begin < n; begin += sampling::kBlock) {
        found.blocks.push_back(
            sum_block(found.weights.data() + begin, std::min(sampling::kBlock, n - begin)));
        found.sum += found.blocks.back();
    }
    return found;
}

inline int64_t pick(const Weighed &weighed, double target) {
    double below = 0;
    size_t block = 0;
    size_t fallback = 0;
    for (; block < weighed.blocks.size(); ++block) {
        fallback = weighed.blocks[block] > 0 ? block : fallback;
        if (below + weighed.blocks[block] > target) {
            break;
        }
        below += weighed.blocks[block];
    }
    block = block < weighed.blocks.size() ? block : fallback;
    const size_t end = std::min(weighed.weights.size(), (block + 1) * size_t(sampling::kBlock));
    size_t last = block * size_t(sampling::kBlock);
    for (size_t i = last; i < end && !(below > target); ++i) {
        if (weighed.weights[i] > 0) {
            last = i;
            below += double(weighed.weights[i]);
        }
    }
    return int64_t(last);
}

struct Entry {
    float x;
    int32_t id;
};

// Remaining candidates of a row, best first.
class Left {
public:
    Left(const float *x, const int32_t *ids, int64_t n) : max_(x[0]) {
        for (int64_t i = 0; i < n; ++i) {
            entries_.push_back({x[i], ids[i]});
        }
    }
    size_t size() const { return entries_.size(); }
    int32_t first() const { return entries_[0].id; }
    float weight(const Entry &entry, float temperature) const {
        return sampling::weight_of(entry.x, max_, temperature);
    }
    double sum(float temperature) const { return weighed(temperature, nullptr).sum; }
    int32_t picked(float temperature, double u) const {
        std::vector<Entry> sorted;
        const Weighed found = weighed(temperature, &sorted);
        return sorted[size_t(pick(found, u * found.sum))].id;
    }
    void keep_best(size_t k) {
        if (k < size()) {
            drop_impossible();
            entries_.resize(std::min(k, size()));
        }
    }
    // False if the candidates may not suffice.
    bool keep_top_p(double wanted, float temperature) {
        drop_impossible();
        double sum = 0;
        size_t n = 0;
        while (n < size() && (sum < wanted || n == 0)) {
            sum += double(weight(entries_[n], temperature));
            ++n;
        }
        const bool is_enough = sum >= wanted || int64_t(size()) < kMaxTopK;
        entries_.resize(n);
        return is_enough;
    }
    void keep_min_p(float floor, float temperature) {
        const auto is_light = [&](const Entry &e) { return !(weight(e, temperature) >= floor); };
        entries_.erase(std::remove_if(entries_.begin(), entries_.end(), is_light), entries_.end());
    }

private:
    void drop_impossible() {
        const auto is_impossible = [](const Entry &e) { return !(e.x > -sampling::kInfinity); };
        entries_.erase(std::remove_if(entries_.begin(), entries_.end(), is_impossible),
                       entries_.end());
    }
    // In the order of ids.
    Weighed weighed(float temperature, std::vector<Entry> *order) const {
        std::vector<Entry> sorted = entries_;
        std::sort(sorted.begin(), sorted.end(),
                  [](const Entry &a, const Entry &b) { return a.id < b.id; });
        std::vector<float> x;
        for (const Entry &entry : sorted) {
            x.push_back(entry.x);
        }
        if (order != nullptr) {
            *order = std::move(sorted);
        }
        return weigh(x.data(), int64_t(x.size()), max_, temperature);
    }

    std::vector<Entry> entries_;
    float max_;
};

struct RowCandidates {
    const float *x; // [k], largest first
    const int32_t *ids;
    int64_t k, vocabulary;
    double sum, u;
    int32_t pick;
    SampleKind kind;
    float temperature;
    const int32_t *processors; // [n_processors]
    const float *values;
    int32_t n_processors;
};

// -1: undecided.
inline int32_t sample_row(const RowCandidates &row) {
    int64_t n = row.k; // above -inf
    while (n > 0 && !(row.x[n - 1] > -sampling::kInfinity)) {
        --n;
    }
    if (n == 0 || row.kind != SampleKind::cut) {
        return n == 0 ? -1 : row.kind == SampleKind::best ? row.ids[0] : row.pick;
    }
    const bool are_all = n < row.k || row.k == row.vocabulary;
    const auto first = LogitsProcessorKind(row.processors[0]);
    float temperature = row.temperature;
    const bool cuts_nothing =
        first == LogitsProcessorKind::top_k && row.values[0] >= float(row.vocabulary);
    Left left(row.x, row.ids, cuts_nothing ? row.k : n);
    if (first == LogitsProcessorKind::min_p && !are_all) {
        const float last = left.weight({row.x[row.k - 1], 0}, temperature);
        if (!(double(last) < double(row.values[0]) * (1 - 1e-6))) {
            return -1;
        }
    }
    for (int32_t i = 0; i < row.n_processors && left.size() > 1; ++i) {
        const float value = row.values[i];
        switch (LogitsProcessorKind(row.processors[i])) {
        case LogitsProcessorKind::temperature:
            temperature = value;
            break;
        case LogitsProcessorKind::top_k:
            left.keep_best(size_t(value));
            break;
        case LogitsProcessorKind::min_p:
            left.keep_min_p(value, temperature);
            break;
        case LogitsProcessorKind::top_p:
            const double all = i == 0 ? row.sum : left.sum(temperature);
            if (!left.keep_top_p(double(value) * all, temperature)) {
                return -1;
            }
            break;
        }
    }
    return left.size() <= 1 ? left.first() : left.picked(temperature, row.u);
}

// The last entry that top_p keeps, as find_cutoff of runner/sampler_math.cpp; id -1: not found.
inline Entry find_cutoff(const std::vector<Entry> &entries, float max, float temperature,
                         double target) {
    double mass[sampling::kCutoffBins] = {};
    std::vector<Entry> bins[sampling::kCutoffBins];
    for (const Entry &entry : entries) {
        const float weight = sampling::weight_of(entry.x, max, temperature);
        if (weight > 0) {
            const int bin = sampling::cutoff_bin(entry.x, max, temperature);
            mass[bin] += double(weight);
            bins[bin].push_back(entry);
        }
    }
    double before = 0;
    for (int bin = 0; bin < sampling::kCutoffBins - 1; ++bin) {
        if (mass[bin] > 0) {
            target -= before;
            before = mass[bin];
        }
        if (mass[bin] > 0 && mass[bin] >= target) {
            std::sort(bins[bin].begin(), bins[bin].end(), [](const Entry &a, const Entry &b) {
                return a.x != b.x ? a.x > b.x : a.id < b.id;
            });
            for (const Entry &entry : bins[bin]) {
                target -= double(sampling::weight_of(entry.x, max, temperature));
                if (target <= 0) {
                    return entry;
                }
            }
        }
    }
    return {0, -1};
}

// A row that its best candidates do not decide, from all logits; -1: undecided.
inline int32_t sample_wide_row(const RowCandidates &row, const float *x) {
    if (row.kind != SampleKind::cut || !(row.x[0] > -sampling::kInfinity)) {
        return -1;
    }
    const float max = row.x[0];
    float temperature = row.temperature;
    bool has_floor = false;
    std::vector<Entry> entries; // in the order of ids
    for (int64_t i = 0; i < row.vocabulary; ++i) {
        if (x[i] > -sampling::kInfinity) {
            entries.push_back({x[i], int32_t(i)});
        }
    }
    const auto drop = [&](const auto &is_dropped) {
        entries.erase(std::remove_if(entries.begin(), entries.end(), is_dropped), entries.end());
    };
    for (int32_t i = 0; i < row.n_processors; ++i) {
        const auto kind = LogitsProcessorKind(row.processors[i]);
        if (kind == LogitsProcessorKind::temperature) {
            temperature = row.values[i];
        } else if (kind == LogitsProcessorKind::top_p && i == 0) {
            const Entry last =
                find_cutoff(entries, max, temperature, double(row.values[i]) * row.sum);
            if (last.id < 0) {
                return -1;
            }
            drop([&](const Entry &e) {
                return !(e.x > last.x || (e.x == last.x && e.id <= last.id));
            });
        } else if (kind == LogitsProcessorKind::min_p && !has_floor) {
            has_floor = true;
            drop([&](const Entry &e) {
                return !(sampling::weight_of(e.x, max, temperature) >= row.values[i]);
            });
        } else {
            return -1;
        }
    }
    std::vector<float> kept;
    for (const Entry &entry : entries) {
        kept.push_back(entry.x);
    }
    const Weighed found = weigh(kept.data(), int64_t(kept.size()), max, temperature);
    return entries[size_t(pick(found, row.u * found.sum))].id;
}

inline void adjust_rows_cpu(const device::Stream & /*stream*/, const Tensor &out,
                            const Tensor &logits, const RowAdjustments &a) {
    const int64_t vocabulary = logits.size(1);
    const auto integers = [](const Tensor &tensor) { return tensor.as<int32_t>(); };
    for (int64_t r = 0; r < out.size(0); ++r) {
        const float *from = logits.as<float>() + integers(a.rows)[r] * vocabulary;
        float *to = out.as<float>() + r * vocabulary;
        const int64_t mask_row = integers(a.mask_rows)[r];
        const int32_t *mask =
            integers(a.masks) + std::max<int64_t>(0, mask_row) * ((vocabulary + 31) / 32);
        for (int64_t i = 0; i < vocabulary; ++i) {
            const bool is_allowed = mask_row < 0 || (uint32_t(mask[i / 32]) >> (i % 32) & 1u) != 0;
            to[i] = is_allowed ? from[i] : -sampling::kInfinity;
        }
        for (int32_t i = integers(a.bias_offsets)[r]; i < integers(a.bias_offsets)[r + 1]; ++i) {
            to[integers(a.bias_ids)[i]] += a.bias_values.as<float>()[i];
        }
        const float *numbers = a.penalties.as<float>() + 3 * r;
        const int32_t pending_row = a.pending_rows.defined() ? integers(a.pending_rows)[r] : -1;
        int64_t late = pending_row >= 0 ? a.sampled.as<int64_t>()[pending_row] : -1;
        const auto penalise = [&](int64_t id, int32_t sampled) {
            to[id] = sampling::penalised(to[id], sampled, numbers[0], numbers[1], numbers[2]);
        };
        for (int32_t i = integers(a.history_offsets)[r]; i < integers(a.history_offsets)[r + 1];
             ++i) {
            const int32_t id = integers(a.history_tokens)[i];
            penalise(id, integers(a.history_sampled)[i] + int32_t(id == late));
            late = id == late ? -1 : late;
        }
        if (late >= 0) {
            penalise(late, 1);
        }
    }
}

inline void weigh_rows_cpu(const device::Stream & /*stream*/, const Tensor &sums,
                           const Tensor &picks, const Tensor &logits, const Tensor &best,
                           const Tensor &rows, const Tensor &temperatures, const Tensor &uniforms) {
    const int64_t vocabulary = logits.size(1);
    for (int64_t r = 0; r < sums.size(0); ++r) {
        const int64_t row = rows.defined() ? rows.as<int32_t>()[r] : r;
        const float max = best.as<float>()[row * best.size(1)];
        const float temperature = temperatures.defined() ? temperatures.as<float>()[r] : 1.0f;
        Weighed found;
        const bool is_there = max > -sampling::kInfinity;
        if (is_there) {
            found = weigh(logits.as<float>() + row * vocabulary, vocabulary, max, temperature);
        }
        std::memcpy(sums.as<int64_t>() + r, &found.sum, sizeof found.sum);
        if (uniforms.defined()) {
            const double u = double_of(uniforms.as<int64_t>()[r]);
            picks.as<int32_t>()[r] = is_there ? int32_t(pick(found, u * found.sum)) : -1;
        }
    }
}

inline void sample_rows_cpu(const device::Stream & /*stream*/, const Tensor &ids,
                            const Tensor &is_open, const Tensor &logits, const Tensor &best_ids,
                            const Tensor &best, const Tensor &sums, const Tensor &picks,
                            const RowSampling &samples) {
    const int64_t k = best.size(1);
    const int64_t vocabulary = logits.size(1);
    for (int64_t r = 0; r < ids.size(0); ++r) {
        const int64_t from = samples.rows.defined() ? samples.rows.as<int32_t>()[r] : r;
        const int64_t at = from * k;
        const int32_t processor = samples.processor_offsets.as<int32_t>()[r];
        const RowCandidates row{best.as<float>() + at,
                                best_ids.as<int32_t>() + at,
                                k,
                                vocabulary,
                                double_of(sums.as<int64_t>()[r]),
                                double_of(samples.uniforms.as<int64_t>()[r]),
                                picks.as<int32_t>()[r],
                                SampleKind(samples.kinds.as<int32_t>()[r]),
                                samples.temperatures.as<float>()[r],
                                samples.processors.as<int32_t>() + processor,
                                samples.processor_values.as<float>() + processor,
                                samples.processor_offsets.as<int32_t>()[r + 1] - processor};
        int32_t id = sample_row(row);
        if (id < 0 && samples.may_be_wide) {
            id = sample_wide_row(row, logits.as<float>() + from * vocabulary);
        }
        is_open.as<int32_t>()[r] = int32_t(id < 0);
        ids.as<int64_t>()[r] = id < 0 ? row.ids[0] : id;
    }
}

inline void rank_rows_cpu(const device::Stream & /*stream*/, const RowRanks &out, const Tensor &ids,
                          const Tensor &logits, const Tensor &rows, const Tensor &best_ids,
                          const Tensor &best) {
    const int64_t m = out.tops.size(1);
    for (int64_t r = 0; r < ids.size(0); ++r) {
        const int64_t from = rows.as<int32_t>()[r];
        const float *row = logits.as<float>() + from * logits.size(1);
        std::copy_n(best_ids.as<int32_t>() + from * best.size(1), m,
                    out.top_ids.as<int32_t>() + r * m);
        std::copy_n(best.as<float>() + from * best.size(1), m, out.tops.as<float>() + r * m);
        const int64_t id = ids.as<int64_t>()[r];
        int32_t rank = 1;
        for (int64_t i = 0; i < logits.size(1); ++i) {
            rank += int32_t(row[i] > row[id] || (row[i] == row[id] && i < id));
        }
        out.logits.as<float>()[r] = row[id];
        out.ranks.as<int32_t>()[r] = rank;
    }
}

inline const bool is_installed =
    (use_row_kernels_on_cpu(adjust_rows_cpu, weigh_rows_cpu, sample_rows_cpu, rank_rows_cpu), true);

} // namespace sample_rows_reference
