// Merges the splits of a token that cuda_decode.cuh has made, in their order.
//
// On compute capability 9 the splits of a token and key/value head are one cluster: each block leaves
// its sums in its shared memory, and all of them merge a part of the outputs each, out of each other's
// memory. On 8 the sums go through memory, and whichever block comes last merges all.
#pragma once

#include "ops/attention/cuda_args.cuh"

#if __CUDA_ARCH__ >= 900
#include <cooperative_groups.h>
#endif

namespace llaisys::ops::cuda {

constexpr int kDecodeWarps = 4;
constexpr int kDecodeThreads = kDecodeWarps * kWarp;
constexpr int kMostSplits = 8; // the largest cluster that every device has

struct DecodeSplits {
    int n; // at most so many splits
    // For devices without clusters only:
    float *partial;    // [tokens, kv_heads, n, heads of 8 * HeadTiles, D + 2]: out, max, sum
    int32_t *counters; // [tokens, kv_heads], zero between calls
};

// Outputs and sums of one value: the splits' own, each scaled down to the largest maximum.
struct SplitSum {
    float value = 0;
    float sum = 0;
    __device__ __forceinline__ void add(float split_value, float split_sum, float fade) {
        value += split_value * fade;
        sum += split_sum * fade;
    }
};

#if __CUDA_ARCH__ >= 900

// merged [group, D], tops and totals [group]: of this block's split, in shared memory. By all threads
// of all blocks of the token and head, also of those that have no split.
template <typename T, int D, int Heads>
__device__ __forceinline__ void merge_splits(const AttentionArgs &args, const DecodeSplits &splits,
                                             int n_splits, float *merged, float *tops,
                                             float *totals, T *out) {
    const auto cluster = cooperative_groups::this_cluster();
    cluster.sync();
    const int step = splits.n * kDecodeThreads;
    for (int i = int(blockIdx.x) * kDecodeThreads + int(threadIdx.x); i < args.group * D;
         i += step) {
        float top[kMostSplits], total[kMostSplits], value[kMostSplits];
#pragma unroll
        for (int s = 0; s < kMostSplits; ++s) { // all under way together
            const bool is_there = s < n_splits;
            const int from = is_there ? s : 0;
            top[s] = is_there ? cluster.map_shared_rank(tops, from)[i / D] : -INFINITY;
            total[s] = is_there ? cluster.map_shared_rank(totals, from)[i / D] : 0.0f;
            value[s] = is_there ? cluster.map_shared_rank(merged, from)[i] : 0.0f;
        }
        float highest = top[0];
#pragma unroll
        for (int s = 1; s < kMostSplits; ++s) {
            highest = fmaxf(highest, top[s]);
        }
        SplitSum all;
#pragma unroll
        for (int s = 0; s < kMostSplits; ++s) {
            all.add(value[s], total[s], exp2f(top[s] - highest));
        }
        out[i / D * args.out_head + i % D] = from_float<T>(all.value / all.sum);
    }
    cluster.sync(); // nobody leaves while its memory is read
}

#else

template <typename T, int D, int Heads>
__device__ __forceinline__ void merge_splits(const AttentionArgs &args, const DecodeSplits &splits,
                                             int n_splits, float *merged, float *tops,
                                             float *totals, T *out) {
    __shared__ bool is_last;
    if (int(blockIdx.x) >= n_splits) {
        return;
    }
    constexpr int kPart = Heads * (D + 2);
    const int64_t unit = int64_t(blockIdx.z) * args.kv_heads + blockIdx.y;
    float *parts = splits.partial + unit * splits.n * kPart;
    float *own = parts + int64_t(blockIdx.x) * kPart;
    __syncthreads(); // merged is complete
    for (int i = threadIdx.x; i < args.group * (D + 2); i += kDecodeThreads) {
        const int head = i / (D + 2);
        const int d = i % (D + 2);
        own[i] = d < D ? merged[head * D + d] : d == D ? tops[head] : totals[head];
    }
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) {
        is_last = atomicAdd(splits.counters + unit, 1) == n_splits - 1;
    }
    __syncthreads();
    if (!is_last) {
        return;
    }
    __threadfence();
    for (int i = threadIdx.x; i < args.group * D; i += kDecodeThreads) {
        const float *part = parts + i / D * (D + 2);
        float highest = -INFINITY;
        for (int s = 0; s < n_splits; ++s) {
            highest = fmaxf(highest, __ldcg(part + int64_t(s) * kPart + D));
        }
        SplitSum all;
        for (int s = 0; s < n_splits; ++s) {
            const float *at = part + int64_t(s) * kPart;
            all.add(__ldcg(at + i % D), __ldcg(at + D + 1), exp2f(__ldcg(at + D) - highest));
        }
        out[i / D * args.out_head + i % D] = from_float<T>(all.value / all.sum);
    }
    if (threadIdx.x == 0) {
        splits.counters[unit] = 0;
    }
}

#endif

} // namespace llaisys::ops::cuda
