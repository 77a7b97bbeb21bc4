// SwiGLU: out = up * gate / (1 + exp(-gate)). 16-bit rows, 16-byte aligned, d a multiple of 8.
// Eight values per thread; memory-bound. Also the parts of SwiGLU in the epilogues of wgmma kernels.
#pragma once

#include "ops/cuda/common.cuh"

namespace llaisys::ops::cuda {

constexpr int kSwigluThreads = 256;

__device__ __forceinline__ float swiglu(float gate, float up) {
    return up * gate / (1.0f + expf(-gate));
}

// gate / (1 + exp(-gate)) of two values with one division. The clamp only affects results that
// round to 0.
__device__ __forceinline__ float2 silu_pair(float a, float b) {
    constexpr float kLog2e = 1.4426950408889634f;
    const float under_a = 1.0f + ex2_approx_ftz(fminf(-kLog2e * a, 60.0f));
    const float under_b = 1.0f + ex2_approx_ftz(fminf(-kLog2e * b, 60.0f));
    const float inverse = __fdividef(1.0f, under_a * under_b);
    return make_float2(a * (under_b * inverse), b * (under_a * inverse));
}

// Transposes 4 x 4 values across a quad: v[j] of lane k becomes v[k] of lane j.
__device__ __forceinline__ void transpose_quad(uint32_t (&v)[4]) {
    const bool is_odd = (threadIdx.x & 1) != 0, is_high = (threadIdx.x & 2) != 0;
    const auto exchange = [](uint32_t &low, uint32_t &high, bool gives_low, int lane) {
        const uint32_t got = __shfl_xor_sync(0xffffffffu, gives_low ? low : high, lane);
        (gives_low ? low : high) = got;
    };
    exchange(v[0], v[1], is_odd, 1);
    exchange(v[2], v[3], is_odd, 1);
    exchange(v[0], v[2], is_high, 2);
    exchange(v[1], v[3], is_high, 2);
}

// 16 rows of a warp from `row` on, of Units * 8 outputs from `output` on: accumulators in the layout of
// wgmma.cuh, those of a unit Step after those of the one before, of up Up after those of gate. A lane
// writes eight adjacent outputs where four units are left, else two.
template <typename T, int Units, int Step, int Up, int N>
__device__ __forceinline__ void store_swiglu(const float (&acc)[N], T *to, int64_t ldo, int m,
                                             int n, int row, int output) {
    const int lane = threadIdx.x % kWarpSize;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const int to_row = row + half * 8 + lane / 4;
        T *out = to + to_row * ldo;
        const auto pair_of = [&](int unit) {
            const float *gate = acc + Step * unit + 2 * half;
            const float2 gated = silu_pair(gate[0], gate[1]);
            return pack_pair<T>(gated.x * gate[Up], gated.y * gate[Up + 1]);
        };
#pragma unroll
        for (int unit = 0; unit + 4 <= Units; unit += 4) {
            uint32_t pairs[4];
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                pairs[j] = pair_of(unit + j);
            }
            transpose_quad(pairs);
            const int column = output + (unit + lane % 4) * 8;
            if (to_row < m && column < n) {
                *reinterpret_cast<uint4 *>(out + column) =
                    make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
            }
        }
#pragma unroll
        for (int unit = Units / 4 * 4; unit < Units; ++unit) {
            const uint32_t pair = pair_of(unit);
            const int column = output + unit * 8;
            if (to_row < m && column < n) {
                *reinterpret_cast<uint32_t *>(out + column + lane % 4 * 2) = pair;
            }
        }
    }
}

// GEMM with fused SwiGLU of 16-bit values: x [m, k], gate and up [n, k], out [m, n].
template <typename T> struct SwigluGemm {
    const T *x, *gate, *up;
    T *out;
    int64_t ldx, ldo;
    int m, n, k;

    bool is_aligned() const {
        return n > 0 && k > 0 && n % 8 == 0 && k % 8 == 0 && ldx % 8 == 0 && ldo % 8 == 0 &&
               is_16_byte_aligned(x) && is_16_byte_aligned(gate) && is_16_byte_aligned(up) &&
               is_16_byte_aligned(out);
    }
};

template <typename T>
__global__ void swiglu_rows_kernel(T *out, int64_t ldo, const T *gate, int64_t ldg, const T *up,
                                   int64_t ldu, int64_t d) {
    launch_dependents();
    grid_dependency_wait();
    const int64_t row = blockIdx.y;
    const int64_t i = (int64_t(blockIdx.x) * kSwigluThreads + threadIdx.x) * 8;
    if (i >= d) {
        return;
    }
    const uint4 g = *reinterpret_cast<const uint4 *>(gate + row * ldg + i);
    const uint4 u = *reinterpret_cast<const uint4 *>(up + row * ldu + i);
    uint4 result;
    const T *gs = reinterpret_cast<const T *>(&g);
    const T *us = reinterpret_cast<const T *>(&u);
    uint32_t *pairs = reinterpret_cast<uint32_t *>(&result);
#pragma unroll
    for (int p = 0; p < 4; ++p) {
        pairs[p] = pack_pair<T>(swiglu(to_float(gs[2 * p]), to_float(us[2 * p])),
                                swiglu(to_float(gs[2 * p + 1]), to_float(us[2 * p + 1])));
    }
    *reinterpret_cast<uint4 *>(out + row * ldo + i) = result;
}

// n rows of d values.
template <typename T>
void swiglu_rows(const device::CudaStream &stream, T *out, int64_t ldo, const T *gate, int64_t ldg,
                 const T *up, int64_t ldu, int64_t n, int64_t d) {
    const dim3 grid(ceil_div(d, 8 * kSwigluThreads), unsigned(n));
    launch(stream, swiglu_rows_kernel<T>, grid, kSwigluThreads, 0, true, out, ldo, gate, ldg, up,
           ldu, d);
}

} // namespace llaisys::ops::cuda
