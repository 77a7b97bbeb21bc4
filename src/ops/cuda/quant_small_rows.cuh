// Rows of x for gemm_small_m_quant.cuh, with one scale per group of 16, 32, 64 or 128 values:
//
//   int4, int8   14-bit integers, x = scale * (64 * high + low), signed bytes; the largest magnitude
//                of a group is 8,127: the error is a thirtieth of that of bf16. The sums of the groups
//                are kept for the minima of the weights.
//   f8           f16 times a power of two, the largest magnitude of a group is 2^13 to 2^14
//
// Normalized rows lack the factor 1 / rms, which is applied to the outputs. The bits of a row do
// not depend on the other rows, or on whether a block of the GEMM or a kernel quantises it.
#pragma once

#include "ops/cuda/quant_activations.cuh"

namespace llaisys::ops::cuda {

constexpr int kSmallRowThreads = 512;
constexpr float kSmallRowLargest = 8127;
// An integer added to kMagicBits is the bits of the float kMagic plus that integer, within 2^22.
constexpr int kMagicBits = 0x4b400000;
constexpr float kMagic = 12582912; // 1.5 * 2^23

struct SmallRows {
    unsigned char *values; // [k / 32, m, 2, 32]: high and low; int4: in the order of the codes
                           // f8: [k / 64, m, 64] f16; the chunks of 16 bytes of odd rows in pairs
                           // change places
    float2 *scales;        // [k / group, m]: scale, and scale times the sum of the integers
    float *factors;        // [m]: of the outputs
    int m;
    int group_shift;

    static int64_t values_bytes(int64_t m, int64_t k) { return m * k * 2; }
    static int64_t scales_bytes(int64_t m, int64_t k, int shift) {
        return ((m * k >> shift) * 8 + 15) / 16 * 16;
    }
};

// Bytes of 8 values in a group whose largest magnitude is `largest`; returns the sum of the integers.
// int4: in the order of the codes.
template <QuantCodes Codes>
__device__ __forceinline__ int int_planes(const float (&values)[8], float largest, uint2 *high,
                                          uint2 *low) {
    constexpr int kOrder[8] = {0, 4, 1, 5, 2, 6, 3, 7};
    const float inverse = largest > 1e-30f ? kSmallRowLargest / largest : 0.0f;
    uint32_t h[2] = {}, l[2] = {};
    int sum = 0;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        const int at = Codes == QuantCodes::int4 ? kOrder[i] : i;
        const int q = __float2int_rn(values[at] * inverse);
        const int of_high = (q + 32) >> 6;
        sum += q;
        h[i / 4] |= uint32_t(of_high & 255) << (i % 4 * 8);
        l[i / 4] |= uint32_t((q - 64 * of_high) & 255) << (i % 4 * 8);
    }
    *high = make_uint2(h[0], h[1]);
    *low = make_uint2(l[0], l[1]);
    return sum;
}

// Quantises row `row` by kSmallRowThreads threads. Returns the sum of squares of the thread's values.
template <typename T, bool Norms, QuantCodes Codes>
__device__ __forceinline__ float quantise_small_row(const GemmInput &in, int row,
                                                    const SmallRows &to) {
    const int lane = threadIdx.x % kWarpSize;
    const int lanes = 1 << (to.group_shift - 3); // of a group
    const int count = in.k / 8;
    float squares = 0;
    for (int from = int(threadIdx.x) - lane; from < count; from += kSmallRowThreads) {
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
        const int64_t group = at / lanes;
        if constexpr (Codes == QuantCodes::f8) {
            const int exponent = int(__float_as_uint(largest) >> 23);
            const bool is_used = exponent >= 14; // otherwise as good as 0
            const float inverse = is_used ? __uint_as_float(uint32_t(267 - exponent) << 23) : 0.0f;
            uint4 halves;
            halves.x = pack_pair<f16>(values[0] * inverse, values[1] * inverse);
            halves.y = pack_pair<f16>(values[2] * inverse, values[3] * inverse);
            halves.z = pack_pair<f16>(values[4] * inverse, values[5] * inverse);
            halves.w = pack_pair<f16>(values[6] * inverse, values[7] * inverse);
            if (at < count) {
                *reinterpret_cast<uint4 *>(to.values + (group * to.m + row) * 128 +
                                           ((at % 8) ^ (row & 1)) * 16) = halves;
                if (at % lanes == 0) {
                    to.scales[group * to.m + row] = make_float2(
                        is_used ? __uint_as_float(uint32_t(exponent - 13) << 23) : 0.0f, 0.0f);
                }
            }
            continue;
        }
        uint2 high, low;
        int sum = int_planes<Codes>(values, largest, &high, &low);
        for (int step = 1; step < lanes; step *= 2) {
            sum += __shfl_xor_sync(kFullMask, sum, step);
        }
        if (at < count) {
            unsigned char *planes = to.values + (int64_t(at / 4) * to.m + row) * 64 + at % 4 * 8;
            *reinterpret_cast<uint2 *>(planes) = high;
            *reinterpret_cast<uint2 *>(planes + 32) = low;
            if (at % lanes == 0) {
                const float scale = largest / kSmallRowLargest;
                to.scales[group * to.m + row] = make_float2(scale, scale * float(sum));
            }
        }
    }
    return squares;
}

// 1 / rms from the sums of squares of the warps.
__device__ __forceinline__ float small_row_factor(const float *squares, const GemmInput &in) {
    float sum = 0;
#pragma unroll
    for (int warp = 0; warp < kSmallRowThreads / kWarpSize; ++warp) {
        sum += squares[warp];
    }
    return 1.0f / sqrtf(sum / float(in.k) + in.epsilon);
}

template <typename T, bool Norms, QuantCodes Codes>
__global__ void __launch_bounds__(kSmallRowThreads)
    quantise_small_rows_kernel(GemmInput in, SmallRows to) {
    __shared__ float squares[kSmallRowThreads / kWarpSize];
    launch_dependents();
    grid_dependency_wait();
    const float own = warp_sum(quantise_small_row<T, Norms, Codes>(in, int(blockIdx.x), to));
    if (threadIdx.x % kWarpSize == 0) {
        squares[threadIdx.x / kWarpSize] = own;
    }
    __syncthreads();
    if (threadIdx.x == 0) {
        to.factors[blockIdx.x] = Norms ? small_row_factor(squares, in) : 1.0f;
    }
}

// Quantises rows of x, or normalizes and quantises rows of the residual stream, into memory of the
// stream.
template <typename T, QuantCodes Codes>
SmallRows quantise_small_rows(device::CudaStream &stream, const GemmInput &in, int group_shift) {
    const int64_t values = SmallRows::values_bytes(in.m, in.k);
    const int64_t scales = SmallRows::scales_bytes(in.m, in.k, group_shift);
    auto *memory =
        static_cast<unsigned char *>(stream.scratch.at_least(size_t(values + scales + in.m * 4)));
    const SmallRows rows{memory, reinterpret_cast<float2 *>(memory + values),
                         reinterpret_cast<float *>(memory + values + scales), in.m, group_shift};
    const auto kernel = in.residual != nullptr ? quantise_small_rows_kernel<T, true, Codes>
                                               : quantise_small_rows_kernel<T, false, Codes>;
    launch(stream, kernel, unsigned(in.m), kSmallRowThreads, 0, true, in, rows);
    return rows;
}

} // namespace llaisys::ops::cuda
