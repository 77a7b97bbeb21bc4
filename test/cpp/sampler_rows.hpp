// Rows of sampling parameters for sampler tests. Include once.
#pragma once

#include "check.hpp"
#include "device/runtime.hpp"
#include "runtime/runner/sampler.hpp"

#include <algorithm>
#include <limits>
#include <map>
#include <memory>
#include <random>
#include <string>

namespace sampler_test {

using namespace llaisys;
using namespace llaisys::runtime;

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();
constexpr uint8_t kPenalties = LLAISYS_SAMPLER_PENALTIES,
                  kTemperature = LLAISYS_SAMPLER_TEMPERATURE, kTopK = LLAISYS_SAMPLER_TOP_K,
                  kTopP = LLAISYS_SAMPLER_TOP_P, kMinP = LLAISYS_SAMPLER_MIN_P,
                  kTypical = LLAISYS_SAMPLER_TYPICAL_P, kXtc = LLAISYS_SAMPLER_XTC,
                  kTopSigma = LLAISYS_SAMPLER_TOP_N_SIGMA, kMirostat = LLAISYS_SAMPLER_MIROSTAT;

inline const device::Stream &stream(int n_threads = 1) {
    static std::map<int, std::unique_ptr<device::Stream>> streams;
    auto &entry = streams[n_threads];
    if (!entry) {
        entry = std::make_unique<device::Stream>(LLAISYS_DEVICE_CPU, 0, n_threads);
    }
    return *entry;
}

// Parameters of one row.
struct Row : RowNumbers {
    int32_t choice = 0, output = 0, mask = -1;
    uint64_t seed = 0;
    int64_t position = 0, seq = 0;
    std::vector<uint8_t> chain{kPenalties, kTemperature, kTopSigma, kTopK,
                               kTypical,   kTopP,        kMinP,     kXtc};
    std::vector<std::pair<int32_t, float>> bias;
};

// Rows as columns; owns the arrays of the metadata.
struct Columns {
    std::vector<int32_t> outputs, choices, chain_offsets{0}, bias_offsets{0}, bias_ids, mask_rows;
    std::vector<int64_t> seqs, positions;
    std::vector<float> bias_values;
    std::vector<uint64_t> seeds;
    std::vector<uint8_t> chain;
    std::vector<uint32_t> masks;
    std::map<std::string, std::vector<double>> numbers;
    std::vector<LlaisysSamplingNumber> entries; // into numbers

    explicit Columns(const std::vector<Row> &rows, std::vector<uint32_t> mask_words = {})
        : masks(std::move(mask_words)) {
        for (const NumberField &field : kNumberFields) {
            std::vector<double> &column = numbers[field.name];
            for (const Row &row : rows) {
                column.push_back(field.of(row));
            }
            entries.push_back({field.name, column.data()});
        }
        for (const Row &row : rows) {
            outputs.push_back(row.output);
            choices.push_back(row.choice);
            mask_rows.push_back(row.mask);
            seqs.push_back(row.seq);
            positions.push_back(row.position);
            seeds.push_back(row.seed);
            chain.insert(chain.end(), row.chain.begin(), row.chain.end());
            chain_offsets.push_back(int32_t(chain.size()));
            for (const auto &entry : row.bias) {
                bias_ids.push_back(entry.first);
                bias_values.push_back(entry.second);
            }
            bias_offsets.push_back(int32_t(bias_ids.size()));
        }
    }
    LlaisysSamplingMetadata view(int64_t vocab = 1) const {
        LlaisysSamplingMetadata s = {};
        s.struct_size = sizeof s;
        s.n_rows = int32_t(outputs.size());
        s.rows = outputs.data();
        s.seq_ids = seqs.data();
        s.numbers = entries.data();
        s.n_numbers = int32_t(entries.size());
        s.seeds = seeds.data();
        s.positions = positions.data();
        s.choices = choices.data();
        s.chain_offsets = chain_offsets.data();
        s.chain = chain.data();
        s.bias_offsets = bias_offsets.data();
        s.bias_ids = bias_ids.data();
        s.bias_values = bias_values.data();
        s.mask_rows = mask_rows.data();
        s.masks = masks.data();
        s.n_masks = int32_t(masks.size() / size_t((vocab + 31) / 32));
        return s;
    }
};

inline std::vector<int32_t> sample(Sampler &sampler, const std::vector<float> &logits,
                                   const std::vector<Row> &rows,
                                   const std::vector<uint32_t> &masks = {}) {
    const Columns columns(rows, masks);
    std::vector<int32_t> ids(rows.size(), -1);
    sampler.sample(logits.data(), int32_t(int64_t(logits.size()) / sampler.vocab()),
                   columns.view(sampler.vocab()), ids.data());
    return ids;
}

inline int32_t sample_one(const std::vector<float> &logits, const Row &row) {
    Sampler sampler(stream(), int64_t(logits.size()));
    return sample(sampler, logits, {row})[0];
}

// Samples a row at 300 positions: 'x' for each id that was sampled, '.' for the others.
inline std::string sampled_ids(const std::vector<float> &logits, const Row &row) {
    Sampler sampler(stream(), int64_t(logits.size()));
    std::vector<Row> rows(300, row);
    for (size_t r = 0; r < rows.size(); ++r) {
        rows[r].position = int64_t(r);
    }
    std::string sampled(logits.size(), '.');
    for (const int32_t id : sample(sampler, logits, rows)) {
        sampled[size_t(id)] = 'x';
    }
    return sampled;
}

inline std::vector<float> random_logits(std::mt19937 &random, size_t n, float spread) {
    std::normal_distribution<float> normal(0, spread);
    std::vector<float> logits(n);
    std::generate(logits.begin(), logits.end(), [&] { return normal(random); });
    return logits;
}

} // namespace sampler_test
