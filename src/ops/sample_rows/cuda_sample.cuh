// Arguments of the kernels of sample_rows.
#pragma once

#include "device/cuda/cuda_runtime.hpp"
#include "ops/sample_rows/op.hpp"

namespace llaisys::ops::cuda {

struct Sampling {
    int64_t *ids;
    int32_t *is_open;
    const int32_t *best_ids;
    const float *best;
    int k;
    const float *logits;
    int64_t vocabulary;
    const double *sums;
    const int32_t *picks;
    const int32_t *rows; // may be null
    const int32_t *kinds;
    const float *temperatures;
    const double *uniforms;
    const int32_t *processor_offsets, *processors;
    const float *processor_values;
};

// Decides rows with is_open set whose first processor is top_p or min_p, from all logits
// (cuda_sample_wide.cu).
void sample_wide_rows(const device::CudaStream &stream, const Sampling &d, int64_t n);

} // namespace llaisys::ops::cuda
