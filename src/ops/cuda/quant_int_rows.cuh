// Rows of x as 14-bit integers for gemm_small_m_int.cuh: x = scale * (64 * high + low), signed
// bytes, with one scale per group of 16, 32, 64 or 128 values. The largest magnitude of a group is
// 8,127: the error is a thirtieth of that of bf16. The sums of the groups are kept for the minima
// of the weights.
//
// Normalized rows lack the factor 1 / rms, which is applied to the outputs. The bits of a row do
// not depend on the other rows, or on whether a block of the GEMM or a kernel quantises it.
#pragma once

#include "ops/cuda/quant_activations.cuh"

namespace llaisys::ops::cuda {

constexpr int kIntRowThreads = 512;
constexpr float kIntRowLargest = 8127;

struct IntRows {
    unsigned char *planes; // [k / 32, m, 2, 32]: high and low; int4: in the order of the codes
    float2 *scales;        // [k / group, m]: scale, and scale times the sum of the integers
    float *factors;        // [m]: of the outputs
    int m;
    int group_shift;

    static int64_t planes_bytes(int64_t m, int64_t k) { return m * k * 2; }
    static int64_t scales_bytes(int64_t m, int64_t k, int shift) {
        return ((m * k >> shift) * 8 + 15) / 16 * 16;
    }
};

// Quantises row `row` by kIntRowThreads threads. Returns the sum of squares of the thread's values.
template <typename T, bool Norms, bool IsInt4>
__device__ __forceinline__ float quantise_int_row(const GemmInput &in, int row, const IntRows &to) {
    constexpr int kOrder[8] = {0, 4, 1, 5, 2, 6, 3, 7}; // of the codes of int4
    const int lane = threadIdx.x % kWarpSize;
    const int lanes = 1 << (to.group_shift - 3); // of a group
    const int count = in.k / 8;
    float squares = 0;
    for (int from = int(threadIdx.x) - lane; from < count; from += kIntRowThreads) {
        const int at = from + lane;
        float values[8] = {};
        if (at < count) {
            load_8<T, Norms>(in, row, at, values, &squares);
        }
        float largest = 0;
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            largest = fmaxf(largest, fabsf(values[i]));
        }
        for (int step = 1; step < lanes; step *= 2) {
            largest = fmaxf(largest, __shfl_xor_sync(kFullMask, largest, step));
        }
        const float inverse = largest > 1e-30f ? kIntRowLargest / largest : 0.0f;
        uint32_t high[2] = {}, low[2] = {};
        int sum = 0;
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            const int q = __float2int_rn(values[IsInt4 ? kOrder[i] : i] * inverse);
            const int h = (q + 32) >> 6;
            sum += q;
            high[i / 4] |= uint32_t(h & 255) << (i % 4 * 8);
            low[i / 4] |= uint32_t((q - 64 * h) & 255) << (i % 4 * 8);
        }
        for (int step = 1; step < lanes; step *= 2) {
            sum += __shfl_xor_sync(kFullMask, sum, step);
        }
        if (at < count) {
            unsigned char *planes = to.planes + (int64_t(at / 4) * to.m + row) * 64 + at % 4 * 8;
            *reinterpret_cast<uint2 *>(planes) = make_uint2(high[0], high[1]);
            *reinterpret_cast<uint2 *>(planes + 32) = make_uint2(low[0], low[1]);
            if (at % lanes == 0) {
                const float scale = largest / kIntRowLargest;
                to.scales[int64_t(at / lanes) * to.m + row] =
                    make_float2(scale, scale * float(sum));
            }
        }
    }
    return squares;
}

// 1 / rms from the sums of squares of the warps.
__device__ __forceinline__ float int_row_factor(const float *squares, const GemmInput &in) {
    float sum = 0;
#pragma unroll
    for (int warp = 0; warp < kIntRowThreads / kWarpSize; ++warp) {
        sum += squares[warp];
    }
    return 1.0f / sqrtf(sum / float(in.k) + in.epsilon);
}

template <typename T, bool Norms, bool IsInt4>
__global__ void __launch_bounds__(kIntRowThreads)
    quantise_int_rows_kernel(GemmInput in, IntRows to) {
    __shared__ float squares[kIntRowThreads / kWarpSize];
    launch_dependents();
    grid_dependency_wait();
    const float own = warp_sum(quantise_int_row<T, Norms, IsInt4>(in, int(blockIdx.x), to));
    if (threadIdx.x % kWarpSize == 0) {
        squares[threadIdx.x / kWarpSize] = own;
    }
    __syncthreads();
    if (threadIdx.x == 0) {
        to.factors[blockIdx.x] = Norms ? int_row_factor(squares, in) : 1.0f;
    }
}

// Quantises rows of x, or normalizes and quantises rows of the residual stream, into memory of the
// stream.
template <typename T, bool IsInt4>
IntRows quantise_int_rows(device::CudaStream &stream, const GemmInput &in, int group_shift) {
    const int64_t planes = IntRows::planes_bytes(in.m, in.k);
    const int64_t scales = IntRows::scales_bytes(in.m, in.k, group_shift);
    auto *memory =
        static_cast<unsigned char *>(stream.scratch.at_least(size_t(planes + scales + in.m * 4)));
    const IntRows rows{memory, reinterpret_cast<float2 *>(memory + planes),
                       reinterpret_cast<float *>(memory + planes + scales), in.m, group_shift};
    const auto kernel = in.residual != nullptr ? quantise_int_rows_kernel<T, true, IsInt4>
                                               : quantise_int_rows_kernel<T, false, IsInt4>;
    launch(stream, kernel, unsigned(in.m), kIntRowThreads, 0, true, in, rows);
    return rows;
}

} // namespace llaisys::ops::cuda
