// Input and output of the device sampler.
#pragma once

#include <cstdint>
#include <vector>

namespace llaisys::runtime {

// Built by Sampler::plan; arrays have one entry per sampled row. Grow-only.
struct SamplingPlan {
    // Whether the device can sample all rows; maybe: unless top_p or min_p keep more than the top-k
    // logits of a row and other processors than temperature and min_p follow.
    enum class Async : uint8_t { no, maybe, yes };
    Async async = Async::no;
    // Every row is the argmax of its output row; nothing below is set.
    bool is_greedy = false;
    // 1: the host sampler must sample the row; the device's id is arbitrary.
    std::vector<uint8_t> on_host;
    int32_t n_on_host = 0;

    std::vector<int32_t> rows;       // output row
    std::vector<float> temperatures; // for sum and pick
    std::vector<double> uniforms;    // for the pick, in [0, 1)
    bool needs_sums = false;
    bool needs_picks = false;
    bool needs_raw = false; // top-k and sums of unadjusted rows too, for logprobs
    bool adjusts = false;   // masks, biases or penalties apply; the arrays below describe them

    const uint32_t *masks = nullptr; // [n_masks, ceil(vocabulary / 32)], owned by the caller
    int32_t n_masks = 0;
    std::vector<int32_t> mask_rows; // -1: none
    std::vector<int32_t> bias_offsets, bias_ids;
    std::vector<float> bias_values;
    std::vector<int32_t> history_offsets, history_tokens, history_sampled;
    std::vector<float> penalties;      // [n, 3]: repetition, presence, frequency
    std::vector<int32_t> pending_rows; // empty: none; see ops::RowAdjustments

    // For ops::sample_rows; see ops::RowSampling.
    std::vector<int32_t> kinds, processor_offsets, processors;
    std::vector<float> processor_values;
    int32_t n_logprobs = 0; // maximum over rows
};

// Logprob data of a result of the device sampler, from unadjusted rows; one entry per sampled row.
// Views, valid until the second next queue; null: no logprobs requested.
struct SampledRows {
    int64_t k = 0;
    const int32_t *ids = nullptr; // [n, k], largest first
    const float *values = nullptr;
    const double *sums = nullptr;
    const float *logits = nullptr; // of the sampled tokens
    const int32_t *ranks = nullptr;
};

} // namespace llaisys::runtime
