// Inverse CDF search, pick() of runtime/runner/sampler_math.cpp, in two parts. One thread each.
#pragma once

#include "base/sampling.hpp"

namespace llaisys::ops::cuda {

// Sum over the 8 lanes of a group of threads in the order of the CPU kernels, ((0 + 4) + (2 + 6)) +
// ((1 + 5) + (3 + 7)). lanes: the group within its warp.
__device__ __forceinline__ double sum_lanes(unsigned lanes, double sum) {
    sum += __shfl_xor_sync(lanes, sum, 4);
    sum += __shfl_xor_sync(lanes, sum, 2);
    sum += __shfl_xor_sync(lanes, sum, 1);
    return sum;
}
// The group of this thread.
__device__ __forceinline__ unsigned own_lanes() {
    return 0xffu << (threadIdx.x % 32 / sampling::kLanes * sampling::kLanes);
}

// Block of weights that contains the target, and the sum below it.
struct Found {
    int64_t begin;
    double below, target;
};

__device__ __forceinline__ Found find_block(const double *block_sums, int n_blocks, double target) {
    double below = 0;
    int block = 0;
    int fallback = 0;
    for (; block < n_blocks; ++block) {
        const double sum = block_sums[block];
        fallback = sum > 0 ? block : fallback;
        if (below + sum > target) {
            break;
        }
        below += sum;
    }
    return {(block < n_blocks ? block : fallback) * sampling::kBlock, below, target};
}

__device__ __forceinline__ int64_t find_weight(const float *block, int64_t count,
                                               const Found &found) {
    double below = found.below;
    int64_t last = 0;
    for (int64_t i = 0; i < count; ++i) {
        if (block[i] > 0) {
            last = i;
            below += double(block[i]);
            if (below > found.target) {
                break;
            }
        }
    }
    return found.begin + last;
}

} // namespace llaisys::ops::cuda
