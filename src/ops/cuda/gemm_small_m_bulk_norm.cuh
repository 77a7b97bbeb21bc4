// RMS norm of f32 rows into shared memory for gemm_small_m_bulk.cuh.
//
// One or two warps per row, so that four or eight rows load at once and few warps synchronize.
// Bound: L2 bandwidth, because every block reads all rows.
#pragma once

#include "ops/cuda/gemm_small_m_bulk_config.cuh"
#include "ops/cuda/mbarrier.cuh"

namespace llaisys::ops::cuda {

constexpr int kBulkNormVectors = 16;                         // float4 values of a row per lane
constexpr int kBulkNormK = kBulkNormVectors * 4 * kWarpSize; // values per warp
constexpr int kBulkMaxNormK = 2 * kBulkNormK;

// Prefetches norm_weight to L1; legal before grid_dependency_wait().
__device__ __forceinline__ void prefetch_norm_weight(const GemmInput &in) {
    constexpr int kLine = 32; // values
    for (int at = threadIdx.x * kLine; at < in.k; at += kBulkConsumerThreads * kLine) {
        asm volatile("prefetch.global.L1 [%0];" ::"l"(in.norm_weight + at));
    }
}

// Called by the consumer threads. scratch: 2 * kBulkConsumerWarps floats. The assignment of
// values to lanes does not depend on m.
template <typename T, int WarpsPerRow>
__device__ __forceinline__ void norm_rows_to_smem(unsigned char *to, uint32_t stride,
                                                  const GemmInput &in, float *scratch) {
    constexpr int kAtOnce = kBulkConsumerWarps / WarpsPerRow; // rows in parallel
    const int lane = threadIdx.x % (WarpsPerRow * kWarpSize);
    const int warp = threadIdx.x / kWarpSize;
    const int team = warp / WarpsPerRow;
    const auto *scale = reinterpret_cast<const float4 *>(in.norm_weight);
    for (int row = team; row < in.m; row += kAtOnce) {
        float4 values[kBulkNormVectors];
        const auto *from = reinterpret_cast<const float4 *>(in.residual_row(row));
#pragma unroll
        for (int j = 0; j < kBulkNormVectors; ++j) {
            const int at = lane + j * WarpsPerRow * kWarpSize;
            values[j] = load_or_zero(from, at, in.k / 4);
        }
        float sum = 0;
#pragma unroll
        for (int j = 0; j < kBulkNormVectors; ++j) {
            sum += sum_of_squares(values[j]);
        }
        sum = warp_sum(sum);
        if constexpr (WarpsPerRow == 2) {
            float *sums = scratch + (row / kAtOnce & 1) * kBulkConsumerWarps; // double buffer
            if (threadIdx.x % kWarpSize == 0) {
                sums[warp] = sum;
            }
            named_barrier_sync_group(team, WarpsPerRow * kWarpSize);
            sum = sums[team * 2] + sums[team * 2 + 1];
        }
        const float factor = 1.0f / sqrtf(sum / float(in.k) + in.epsilon);
        auto *to_row = reinterpret_cast<uint2 *>(to + uint32_t(row) * stride);
#pragma unroll
        for (int j = 0; j < kBulkNormVectors; ++j) {
            const int at = lane + j * WarpsPerRow * kWarpSize;
            if (at < in.k / 4) {
                to_row[at] = normed_pairs<T>(values[j], factor, __ldg(scale + at));
            }
        }
    }
    named_barrier_sync<1, kBulkConsumerThreads>();
}

} // namespace llaisys::ops::cuda
