// Rows of x as e4m3 planes for gemm_tma_quant.cuh: x = scale * (high + low), where high is x /
// scale rounded to e4m3 and low the rest, rounded. Two planes have 8 significant bits, as bf16 has.
// The largest magnitude of a row is 448. One block per row; latency-bound.
//
// For int8 weights, the sums of 32 (groups of 16: 16) values are kept for the minima of the groups,
// times the factor 2^-9 of the codes.
#pragma once

#include "ops/cuda/dispatch.cuh"
#include "ops/cuda/gemm_epilogue.cuh"
#include "ops/quant_rows.hpp"

#include <cuda_fp8.h>

namespace llaisys::ops::cuda {

// In memory of the stream.
struct QuantRows {
    unsigned char *values; // [planes, m, k]
    float *scales;         // [m]
    float *sums;           // [m, sums_pitch()]
    int m;
    int64_t k;
    int planes;
    int sum_values; // per sum; 0: no sums

    int64_t sums_pitch() const { return sum_values > 0 ? (k / sum_values + 3) / 4 * 4 : 0; }
};

// Values of x per sum for these weights.
inline int quant_sum_values(const QuantRowLayout &layout) {
    return layout.codes == QuantCodes::f8 ? 0 : layout.group < 32 ? layout.group : 32;
}

// Two values as e4m3, the first in the low byte; saturates.
__device__ __forceinline__ uint16_t e4m3_pair(float low, float high) {
    return __nv_cvt_float2_to_fp8x2(make_float2(low, high), __NV_SATFINITE, __NV_E4M3);
}
__device__ __forceinline__ float2 e4m3_floats(uint16_t pair) {
    const __half2_raw halves = __nv_cvt_fp8x2_to_halfraw2(pair, __NV_E4M3);
    return __half22float2(*reinterpret_cast<const __half2 *>(&halves));
}

// Values 8 at to 8 at + 7 of a row of x; Norms: of the residual stream, times the norm weight.
template <typename T, bool Norms>
__device__ __forceinline__ void load_8(const GemmInput &in, int row, int at, float (&to)[8],
                                       float *squares) {
    if constexpr (Norms) {
        const auto *from = reinterpret_cast<const float4 *>(in.residual_row(row));
        const auto *scale = reinterpret_cast<const float4 *>(in.norm_weight);
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const float4 v = from[2 * at + h], w = scale[2 * at + h];
            *squares += sum_of_squares(v);
            to[4 * h] = v.x * w.x;
            to[4 * h + 1] = v.y * w.y;
            to[4 * h + 2] = v.z * w.z;
            to[4 * h + 3] = v.w * w.w;
        }
    } else {
        const uint4 bits = reinterpret_cast<const uint4 *>(static_cast<const T *>(in.x) +
                                                           int64_t(row) * in.ldx)[at];
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            to[i] = to_float(reinterpret_cast<const T *>(&bits)[i]);
        }
    }
}

// Both planes of 8 values, two words each; returns the sum of what they represent.
__device__ __forceinline__ float e4m3_words(const float (&values)[8], float inverse,
                                            uint32_t (&words)[2][2]) {
    float sum = 0;
#pragma unroll
    for (int w = 0; w < 2; ++w) {
        uint16_t high[2], low[2];
#pragma unroll
        for (int p = 0; p < 2; ++p) {
            const int i = w * 4 + p * 2;
            const float a = values[i] * inverse;
            const float b = values[i + 1] * inverse;
            high[p] = e4m3_pair(a, b);
            const float2 of = e4m3_floats(high[p]);
            low[p] = e4m3_pair(a - of.x, b - of.y);
            const float2 rest = e4m3_floats(low[p]);
            sum += (of.x + rest.x) + (of.y + rest.y);
        }
        words[0][w] = high[0] | uint32_t(high[1]) << 16;
        words[1][w] = low[0] | uint32_t(low[1]) << 16;
    }
    return sum;
}

constexpr int kQuantRowThreads = 512;

// T: dtype of in.x. Vectors: 8 values each, kept per thread; 0: the row is read twice.
template <typename T, bool Norms, int Vectors>
__global__ void __launch_bounds__(kQuantRowThreads)
    quantise_rows_kernel(GemmInput in, QuantRows out, int64_t sums_pitch) {
    __shared__ float scratch[kQuantRowThreads / kWarpSize];
    launch_dependents();
    grid_dependency_wait();
    const int row = int(blockIdx.x);
    const int count = in.k / 8;
    const int rounds = (count + kQuantRowThreads - 1) / kQuantRowThreads;
    const auto load = [&](int at, float (&to)[8], float *squares) {
        load_8<T, Norms>(in, row, at, to, squares);
    };
    float kept[Vectors > 0 ? Vectors : 1][8] = {};
    float squares = 0, largest = 0;
    const auto measure = [&](const float (&values)[8]) {
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            largest = fmaxf(largest, fabsf(values[i]));
        }
    };
#pragma unroll
    for (int j = 0; j < Vectors; ++j) {
        const int at = int(threadIdx.x) + j * kQuantRowThreads;
        if (at < count) {
            load(at, kept[j], &squares);
        }
        measure(kept[j]);
    }
    for (int at = int(threadIdx.x); Vectors == 0 && at < count; at += kQuantRowThreads) {
        load(at, kept[0], &squares);
        measure(kept[0]);
    }
    largest = block_max<kQuantRowThreads>(largest, scratch);
    float factor = 1;
    if constexpr (Norms) {
        squares = block_sum<kQuantRowThreads>(squares, scratch);
        factor = 1.0f / sqrtf(squares / float(in.k) + in.epsilon);
    }
    const float inverse = largest > 0 ? 448.0f / largest : 0.0f;
    if (threadIdx.x == 0) {
        out.scales[row] = largest / 448.0f * factor;
    }
    unsigned char *to_row = out.values + int64_t(row) * in.k;
    const int64_t plane = int64_t(out.m) * in.k;
    const auto put = [&](int at, const float (&values)[8]) { // all lanes of a warp
        uint32_t words[2][2];                                // of both planes
        float sum = e4m3_words(values, inverse, words);
        if (out.sum_values > 0) {
            const int lanes = out.sum_values / 8; // 2 or 4
            sum += __shfl_xor_sync(kFullMask, sum, 1);
            sum += lanes == 4 ? __shfl_xor_sync(kFullMask, sum, 2) : 0.0f;
            if (at < count && at % lanes == 0) {
                out.sums[row * sums_pitch + at / lanes] = sum * 0x1p-9f;
            }
        }
        for (int p = 0; p < out.planes && at < count; ++p) {
            reinterpret_cast<uint2 *>(to_row + p * plane)[at] =
                make_uint2(words[p][0], words[p][1]);
        }
    };
#pragma unroll
    for (int j = 0; j < Vectors; ++j) {
        put(int(threadIdx.x) + j * kQuantRowThreads, kept[j]);
    }
    for (int j = 0; Vectors == 0 && j < rounds; ++j) {
        const int at = int(threadIdx.x) + j * kQuantRowThreads;
        if (at < count) {
            load(at, kept[0], &squares);
        }
        put(at, kept[0]);
    }
}

// Quantises rows of x, or normalizes and quantises rows of the residual stream, into memory of the
// stream, for weights of a layout. k: a multiple of 32.
template <typename T>
QuantRows quantise_rows(device::CudaStream &stream, const GemmInput &in,
                        const QuantRowLayout &layout, int planes) {
    QuantRows rows{};
    rows.m = in.m;
    rows.k = in.k;
    rows.planes = planes;
    rows.sum_values = quant_sum_values(layout);
    const size_t scales = (size_t(in.m) * 4 + 255) / 256 * 256;
    const size_t sums = (size_t(in.m) * rows.sums_pitch() * 4 + 255) / 256 * 256;
    auto *memory = static_cast<unsigned char *>(
        stream.scratch.at_least(scales + sums + size_t(planes) * in.m * in.k));
    rows.scales = reinterpret_cast<float *>(memory);
    rows.sums = reinterpret_cast<float *>(memory + scales);
    rows.values = memory + scales + sums;
    constexpr int kStep = kQuantRowThreads * 8;
    const int vectors = in.k <= kStep ? 1 : in.k <= 5 * kStep ? 5 : 0;
    dispatch_int<0, 1, 5>(vectors, [&](auto n) {
        const auto kernel = in.residual != nullptr ? quantise_rows_kernel<T, true, n()>
                                                   : quantise_rows_kernel<T, false, n()>;
        launch(stream, kernel, unsigned(in.m), kQuantRowThreads, 0, true, in, rows,
               rows.sums_pitch());
    });
    return rows;
}

} // namespace llaisys::ops::cuda
