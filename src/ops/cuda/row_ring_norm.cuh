// How the row ring (row_ring.cuh) normalises f32 rows into shared memory.
//
// One or two warps have a row, so that four or eight rows are on their way at once and hardly a warp waits for
// another. Bound by the road from the second-level cache: every block reads all rows.
#pragma once

#include "ops/cuda/bulk.cuh"
#include "ops/cuda/row_ring_shape.cuh"

namespace llaisys::ops::cuda {

constexpr int kRingNormVectors = 16;                     // of 4 values that a lane has of a row
constexpr int kRingNormK = kRingNormVectors * 4 * kWarp; // most values of a warp
constexpr int kRingLongestNorm = 2 * kRingNormK;

// norm_weight may be brought near before the input is there.
__device__ __forceinline__ void prefetch_norm_weight(const FewRowsInput &in) {
    constexpr int kLine = 32; // values
    for (int at = threadIdx.x * kLine; at < in.k; at += kRingThreads * kLine) {
        asm volatile("prefetch.global.L1 [%0];" ::"l"(in.norm_weight + at));
    }
}

// By the threads that compute; scratch: 2 * kRingWarps floats. Every lane has the same values of a row
// whatever the number of rows.
template <typename T, int WarpsARow>
__device__ __forceinline__ void norm_rows_inside(unsigned char *to, uint32_t stride,
                                                 const FewRowsInput &in, float *scratch) {
    constexpr int kAtOnce = kRingWarps / WarpsARow; // rows
    const int lane = threadIdx.x % (WarpsARow * kWarp);
    const int warp = threadIdx.x / kWarp;
    const int team = warp / WarpsARow;
    const auto *scale = reinterpret_cast<const float4 *>(in.norm_weight);
    for (int row = team; row < in.m; row += kAtOnce) {
        float4 values[kRingNormVectors];
        const auto *from = reinterpret_cast<const float4 *>(in.residual_row(row));
#pragma unroll
        for (int j = 0; j < kRingNormVectors; ++j) {
            const int at = lane + j * WarpsARow * kWarp;
            values[j] = at < in.k / 4 ? from[at] : make_float4(0, 0, 0, 0);
        }
        float sum = 0;
#pragma unroll
        for (int j = 0; j < kRingNormVectors; ++j) {
            const float4 v = values[j];
            sum += v.x * v.x + v.y * v.y + v.z * v.z + v.w * v.w;
        }
        sum = warp_sum(sum);
        if constexpr (WarpsARow == 2) {
            float *sums = scratch + (row / kAtOnce & 1) * kRingWarps; // the next row's lie beside
            if (threadIdx.x % kWarp == 0) {
                sums[warp] = sum;
            }
            meet_team(team, WarpsARow * kWarp);
            sum = sums[team * 2] + sums[team * 2 + 1];
        }
        const float factor = 1.0f / sqrtf(sum / float(in.k) + in.epsilon);
        auto *to_row = reinterpret_cast<uint2 *>(to + uint32_t(row) * stride);
#pragma unroll
        for (int j = 0; j < kRingNormVectors; ++j) {
            const int at = lane + j * WarpsARow * kWarp;
            if (at < in.k / 4) {
                const float4 v = values[j];
                const float4 w = __ldg(scale + at);
                to_row[at] = make_uint2(pack_pair<T>(v.x * factor * w.x, v.y * factor * w.y),
                                        pack_pair<T>(v.z * factor * w.z, v.w * factor * w.w));
            }
        }
    }
    meet<1, kRingThreads>();
}

} // namespace llaisys::ops::cuda
