// What the rows of a draw need of a device that has their logits, and what it found out.
#pragma once

#include <cstdint>
#include <vector>

namespace llaisys::runtime {

// Made by Sampler::plan; by row of the draw. Grow-only.
struct DrawPlan {
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
    std::vector<int32_t> history_offsets, history_tokens, history_drawn;
    std::vector<float> penalties; // [n, 3]: repetition, presence, frequency
};

// What DeviceDraw::reduce brings to the host. Views, valid until the next call.
struct ReducedRows {
    int64_t k = 0;            // best of a row: largest first, the lower id first among equals
    bool is_adjusted = false; // ids and values have the rows of the draw, not those of the outputs
    const int32_t *ids = nullptr; // [.., k]
    const float *values = nullptr;
    const double *sums = nullptr;   // by row of the draw; null: not wanted
    const int32_t *picks = nullptr; // the same
    // Of the rows as they are; null: not wanted.
    const int32_t *raw_ids = nullptr; // [outputs, k]
    const float *raw_values = nullptr;
    const double *raw_sums = nullptr; // by row of the draw, at temperature 1
};

} // namespace llaisys::runtime
