// RMS norm: out = x / rms(x) * weight. f32 rows, 16-byte aligned, d a multiple of 4; f32 weight;
// 16-bit out.
//
// One block per row. Rows of up to 4,096 values stay in registers between the reduction and the
// output. Memory-bound; latency-bound for few rows.
#pragma once

#include "ops/cuda/common.cuh"

namespace llaisys::ops::cuda {

constexpr int kNormThreads = 256;

// Row i reads row rows[i] of x when rows is set. Vectors: float4 values kept per thread; 0: the
// row is read twice.
template <typename T, int Vectors>
__global__ void __launch_bounds__(kNormThreads)
    rms_norm_rows_kernel(T *out, int64_t ldo, const float *x, int64_t ldx, const int32_t *rows,
                         const float *weight, int64_t d, float epsilon) {
    __shared__ float scratch[kNormThreads / kWarpSize];
    launch_dependents();
    const float4 *scale = reinterpret_cast<const float4 *>(weight);
    float4 scales[Vectors > 0 ? Vectors : 1];
#pragma unroll
    for (int j = 0; j < Vectors; ++j) { // constant: may be read before grid_dependency_wait()
        const int64_t i = threadIdx.x + j * kNormThreads;
        scales[j] = load_or_zero(scale, i, d / 4);
    }
    grid_dependency_wait();
    const int64_t row = blockIdx.x;
    const int64_t from = rows != nullptr ? rows[row] : row;
    const float4 *in = reinterpret_cast<const float4 *>(x + from * ldx);
    uint2 *to = reinterpret_cast<uint2 *>(out + row * ldo);
    float4 values[Vectors > 0 ? Vectors : 1];
    float sum = 0;
#pragma unroll
    for (int j = 0; j < Vectors; ++j) {
        const int64_t i = threadIdx.x + j * kNormThreads;
        values[j] = load_or_zero(in, i, d / 4);
    }
#pragma unroll
    for (int j = 0; j < Vectors; ++j) {
        sum += sum_of_squares(values[j]);
    }
    for (int64_t i = threadIdx.x; Vectors == 0 && i < d / 4; i += kNormThreads) {
        sum += sum_of_squares(in[i]);
    }
    sum = block_sum<kNormThreads>(sum, scratch);
    const float factor = 1.0f / sqrtf(sum / float(d) + epsilon);
#pragma unroll
    for (int j = 0; j < Vectors; ++j) {
        const int64_t i = threadIdx.x + j * kNormThreads;
        if (i < d / 4) {
            to[i] = normed_pairs<T>(values[j], factor, scales[j]);
        }
    }
    for (int64_t i = threadIdx.x; Vectors == 0 && i < d / 4; i += kNormThreads) {
        to[i] = normed_pairs<T>(in[i], factor, scale[i]);
    }
}

// n rows of d values.
template <typename T>
void rms_norm_rows(const device::CudaStream &stream, T *out, int64_t ldo, const float *x,
                   int64_t ldx, const int32_t *rows, const float *weight, int64_t n, int64_t d,
                   float epsilon) {
    const auto kernel = d <= 2 * 4 * kNormThreads   ? rms_norm_rows_kernel<T, 2>
                        : d <= 4 * 4 * kNormThreads ? rms_norm_rows_kernel<T, 4>
                                                    : rms_norm_rows_kernel<T, 0>;
    launch(stream, kernel, unsigned(n), kNormThreads, 0, true, out, ldo, x, ldx, rows, weight, d,
           epsilon);
}

} // namespace llaisys::ops::cuda
