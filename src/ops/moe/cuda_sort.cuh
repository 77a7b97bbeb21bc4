// Sorts the pairs of tokens and experts by expert.
#pragma once

#include "ops/cuda/common.cuh"

namespace llaisys::ops::cuda {

constexpr int kSortThreads = 1024;
constexpr int kSortEach = 32;

// Block e writes offset e and the pairs of expert e in ascending order. Each thread counts up to
// kSortEach adjacent pairs per round, a multiple of 4. experts: 16-byte aligned.
__global__ inline void __launch_bounds__(kSortThreads)
    sort_kernel(int32_t *sorted, const int32_t *experts, int n_pairs, int n_experts) {
    constexpr int kWarps = kSortThreads / kWarpSize;
    constexpr int kNone = INT32_MAX; // past the end
    __shared__ int warp_lower[kWarps], warp_equal[kWarps];
    launch_dependents();
    grid_dependency_wait();
    const int expert = int(blockIdx.x), threads = int(blockDim.x);
    const int lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize;
    const int each = min(kSortEach, ((n_pairs + threads - 1) / threads + 3) / 4 * 4);
    const int round = threads * each;
    int values[kSortEach];
    const auto load = [&](int first) {
#pragma unroll
        for (int i = 0; i < kSortEach; i += 4) {
            int4 four = make_int4(kNone, kNone, kNone, kNone);
            const int at = first + i;
            if (i < each && at + 3 < n_pairs) {
                four = *reinterpret_cast<const int4 *>(experts + at);
            } else if (i < each) {
                four.x = at < n_pairs ? experts[at] : kNone;
                four.y = at + 1 < n_pairs ? experts[at + 1] : kNone;
                four.z = at + 2 < n_pairs ? experts[at + 2] : kNone;
            }
            values[i] = four.x, values[i + 1] = four.y, values[i + 2] = four.z,
            values[i + 3] = four.w;
        }
    };
    const auto count_equal = [&] {
        int equal = 0;
#pragma unroll
        for (int i = 0; i < kSortEach; ++i) {
            equal += values[i] == expert ? 1 : 0;
        }
        return equal;
    };
    int lower = 0;
    for (int base = 0; base < n_pairs; base += round) {
        load(base + int(threadIdx.x) * each);
#pragma unroll
        for (int i = 0; i < kSortEach; ++i) {
            lower += values[i] < expert ? 1 : 0;
        }
    }
    lower = int(__reduce_add_sync(kFullMask, unsigned(lower)));
    if (lane == 0) {
        warp_lower[warp] = lower;
    }
    int start = 0; // of the pairs of the round
    for (int base = 0; base < n_pairs; base += round) {
        const int first = base + int(threadIdx.x) * each;
        if (n_pairs > round) {
            load(first);
        }
        const int equal = count_equal();
        int before = equal; // inclusive
#pragma unroll
        for (int step = 1; step < kWarpSize; step *= 2) {
            const int other = __shfl_up_sync(kFullMask, before, step);
            before += lane >= step ? other : 0;
        }
        if (lane == kWarpSize - 1) {
            warp_equal[warp] = before;
        }
        __syncthreads();
        int earlier = 0, all = 0;
        for (int w = 0; w < threads / kWarpSize; ++w) {
            start += base == 0 ? warp_lower[w] : 0;
            earlier += w < warp ? warp_equal[w] : 0;
            all += warp_equal[w];
        }
        if (threadIdx.x == 0 && base == 0) {
            sorted[expert] = start;
            if (expert == n_experts - 1) {
                sorted[n_experts] = n_pairs;
            }
        }
        int32_t *to = sorted + n_experts + 1 + start + earlier + before - equal;
#pragma unroll
        for (int i = 0; i < kSortEach; ++i) {
            if (values[i] == expert) {
                *to++ = first + i;
            }
        }
        start += all;
        __syncthreads(); // before the next round overwrites warp_equal
    }
}

} // namespace llaisys::ops::cuda
