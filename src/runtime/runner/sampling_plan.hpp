// What the rows of a sample need of a device that has their logits, and what it found out.
#pragma once

#include <cstdint>
#include <vector>

namespace llaisys::runtime {

// Made by Sampler::plan; by row of the sample. Grow-only.
struct SamplingPlan {
    // Whether a device can make the whole sample: perhaps, where its best of a row may be too few.
    enum class Ahead : uint8_t { no, perhaps, surely };
    Ahead ahead = Ahead::no;

    std::vector<int32_t> rows;       // row of the outputs
    std::vector<float> temperatures; // of the sum and the pick
    std::vector<double> uniforms;    // of the pick, in [0, 1)
    bool wants_sums = false;
    bool wants_picks = false;
    bool wants_raw = false; // best and sums of the rows as they are too, for logprobs
    bool adjusts = false;   // masks, biases or penalties come first: what follows is for these

    const uint32_t *masks = nullptr; // [n_masks, ceil(vocabulary / 32)], the caller's
    int32_t n_masks = 0;
    std::vector<int32_t> mask_rows; // -1: none
    std::vector<int32_t> bias_offsets, bias_ids;
    std::vector<float> bias_values;
    std::vector<int32_t> history_offsets, history_tokens, history_sampled;
    std::vector<float> penalties;   // [n, 3]: repetition, presence, frequency
    std::vector<int32_t> late_rows; // empty: none; see ops::RowAdjustments

    // Of a whole sample; see ops::RowSampling.
    std::vector<int32_t> kinds, link_offsets, links;
    std::vector<float> link_values;
    int32_t n_logprobs = 0; // the most that a row wants
};

// What DeviceSampler::reduce brings to the host. Views, valid until the next call.
struct ReducedRows {
    int64_t k = 0; // best of a row: largest first, the lower id first among equals
    bool is_adjusted =
        false; // ids and values have the rows of the sample, not those of the outputs
    const int32_t *ids = nullptr; // [.., k]
    const float *values = nullptr;
    const double *sums = nullptr;   // by row of the sample; null: not wanted
    const int32_t *picks = nullptr; // the same
    // Of the rows as they are; null: not wanted.
    const int32_t *raw_ids = nullptr; // [outputs, k]
    const float *raw_values = nullptr;
    const double *raw_sums = nullptr; // by row of the sample, at temperature 1
};

// What comes to the host of a sample that a device made, beside the ids: of the rows as they are. Views,
// valid until the next sample but one is queued, by row of the sample; null: no logprobs are wanted.
struct SampledRows {
    int64_t k = 0;
    const int32_t *ids = nullptr; // [n, k], best first
    const float *values = nullptr;
    const double *sums = nullptr;
    const float *logits = nullptr; // of the sampled tokens
    const int32_t *ranks = nullptr;
};

} // namespace llaisys::runtime
