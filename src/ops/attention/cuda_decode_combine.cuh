// Combines the KV splits of a token (split-KV decode, cuda_decode.cuh) in split order.
//
// Compute capability 9: up to kMaxSplits splits of a token and KV head form a cluster. The outputs
// are divided into parts of 128 values; part p belongs to block p % n. Each block stores its partial
// results into the shared memory of the owning block (DSMEM), which waits for all splits and combines
// them. Long sequences have several clusters: the owners of a part then store the result of their
// cluster to global memory, and the last of them to finish combines the clusters in order. Compute
// capability 8: partial results go through global memory and the last block to finish combines them.
#pragma once

#include "ops/attention/cuda_args.cuh"
#include "ops/cuda/cluster.cuh"

namespace llaisys::ops::cuda {

constexpr int kDecodeWarps = 4;
constexpr int kDecodeThreads = kDecodeWarps * kWarpSize;
constexpr int kMaxSplits = 8;    // per cluster: the largest portable size
constexpr int kMaxClusters = 16; // per token and KV head

// Splits of a token and KV head: at most n * clusters, n of them a cluster. Devices without clusters
// have clusters = 1.
struct SplitKv {
    int n;
    int clusters;
    // With several clusters: [tokens, kv_heads, clusters, cluster_partial_floats]. Devices without
    // clusters: [tokens, kv_heads, n, heads of 8 * HeadTiles, D + 2]: out, max, sum.
    float *partial;
    int32_t *counters; // [tokens, kv_heads, n], zero between calls
};

// Sum over splits of outputs and denominators, each rescaled to the global maximum.
struct WeightedSum {
    float value = 0;
    float sum = 0;
    __device__ __forceinline__ void add(float split_value, float split_sum, float rescale) {
        value += split_value * rescale;
        sum += split_sum * rescale;
    }
};

// Stores value i of [group, D] of the KV head of this block.
template <typename T, int D>
__device__ __forceinline__ void store_combined(const AttentionArgs &args, T *out, int i, float max,
                                               const WeightedSum &all) {
    const int head = int(blockIdx.y) * args.group + i / D;
    out[i / D * args.out_head + i % D] =
        from_float<T>(all.value / args.with_sink(head, max, all.sum));
}

// A part is 128 values of [group, D]. Heads that it may contain values of, and its bytes: values, then
// maximum and denominator of these heads.
template <int D>
constexpr int kPartHeads = D % kDecodeThreads == 0   ? 1
                           : kDecodeThreads % D == 0 ? kDecodeThreads / D
                                                     : (D + kDecodeThreads - 2) / D + 1;
template <int D> constexpr int kPartBytes = kDecodeThreads * 4 + kPartHeads<D> * 8;
template <int D> __host__ __device__ constexpr int n_parts(int group) {
    return (group * D + kDecodeThreads - 1) / kDecodeThreads;
}
// Workspace of a block with n splits: its parts per split.
template <int D> constexpr int combine_bytes(int group, int n) {
    return n == 1 ? 0 : (n_parts<D>(group) + n - 1) / n * n * kPartBytes<D>;
}
// Result of one cluster in global memory: all parts.
template <int D> __host__ __device__ constexpr int64_t cluster_partial_floats(int group) {
    return int64_t(n_parts<D>(group)) * (kPartBytes<D> / 4);
}
// The head of value i within its part, and whether i is the first value of it there.
template <int D> __device__ __forceinline__ int head_in_part(int i) {
    return kDecodeThreads % D == 0 ? i % kDecodeThreads / D : i / D - (i - i % kDecodeThreads) / D;
}
template <int D> __device__ __forceinline__ bool starts_head(int i) {
    return i % D == 0 || (kDecodeThreads % D != 0 && i % kDecodeThreads == 0);
}

#if __CUDA_ARCH__ >= 900

// For a token and KV head with n_splits > 1; called by all threads of all blocks of the clusters,
// also by blocks without a split. workspace: combine_bytes, 8-byte aligned; barrier: in shared memory.
template <typename T, int D, int Heads, bool Long> class SplitCombine {
public:
    __device__ __forceinline__ SplitCombine(const AttentionArgs &args, const SplitKv &splits,
                                            int n_splits, uint32_t workspace, uint32_t barrier)
        : group_(args.group), n_(splits.n), n_splits_(n_splits), rank_(int(blockIdx.x)),
          workspace_(workspace), barrier_(barrier) {
        if constexpr (Long) {
            rank_ = int(blockIdx.x) % n_;
            const int cluster = int(blockIdx.x) / n_;
            n_clusters_ = (n_splits + n_ - 1) / n_;
            n_splits_ = min(n_splits - cluster * n_, n_);
            const int64_t unit = int64_t(blockIdx.z) * args.kv_heads + blockIdx.y;
            first_ = splits.partial + unit * splits.clusters * cluster_partial_floats<D>(group_);
            own_ = first_ + cluster * cluster_partial_floats<D>(group_);
            counter_ = splits.counters + unit * n_ + rank_;
        }
    }
    // False: no split of the token belongs to this cluster.
    __device__ __forceinline__ bool has_splits() const { return !Long || n_splits_ > 0; }
    __device__ __forceinline__ void init() {
        if (threadIdx.x == 0) {
            mbarrier_init(barrier_, 1);
            fence_mbarrier_init();
            int bytes = 0;
            for (int part = rank_; part * kDecodeThreads < group_ * D; part += n_) {
                const int first = part * kDecodeThreads;
                const int values = min(kDecodeThreads, group_ * D - first);
                const int heads =
                    kDecodeThreads % D == 0 ? values / D : (first + values - 1) / D - first / D + 1;
                bytes += values * 4 + heads * 8;
            }
            mbarrier_arrive_expect_tx(barrier_, uint32_t(n_splits_ * bytes));
        }
        barrier_cluster_arrive();
    }
    // After init and before the first store_partial: all mbarriers are initialized.
    __device__ __forceinline__ void wait_peers() { barrier_cluster_wait(); }
    // Value i of [group, D] of this block's split, with maximum and denominator of its head.
    __device__ __forceinline__ void store_partial(int i, float value, float top, float sum) {
        const int part = i / kDecodeThreads;
        const auto to = uint32_t(part % n_);
        const uint32_t at = mapa(part_address(part / n_, rank_), to);
        const uint32_t barrier = mapa(barrier_, to);
        st_async(at + uint32_t(i % kDecodeThreads) * 4, value, barrier);
        if (starts_head<D>(i)) {
            st_async(at + kDecodeThreads * 4 + uint32_t(head_in_part<D>(i)) * 8,
                     make_float2(top, sum), barrier);
        }
    }
    __device__ __forceinline__ void finish(const AttentionArgs &args, T *out,
                                           const unsigned char *workspace) {
        mbarrier_wait_parity_cluster(barrier_, 0);
        for (int own = 0; (own * n_ + rank_) * kDecodeThreads < group_ * D; ++own) {
            const int i = (own * n_ + rank_) * kDecodeThreads + int(threadIdx.x);
            if (i >= group_ * D) {
                break;
            }
            float2 stats[kMaxSplits];
            float value[kMaxSplits];
#pragma unroll
            for (int s = 0; s < kMaxSplits; ++s) {
                const unsigned char *at =
                    workspace + (part_address(own, min(s, n_splits_ - 1)) - workspace_);
                const bool is_there = s < n_splits_;
                value[s] = is_there ? reinterpret_cast<const float *>(at)[threadIdx.x] : 0.0f;
                stats[s] = is_there ? reinterpret_cast<const float2 *>(
                                          at + kDecodeThreads * 4)[head_in_part<D>(i)]
                                    : make_float2(-INFINITY, 0.0f);
            }
            float highest = stats[0].x;
#pragma unroll
            for (int s = 1; s < kMaxSplits; ++s) {
                highest = fmaxf(highest, stats[s].x);
            }
            WeightedSum all;
#pragma unroll
            for (int s = 0; s < kMaxSplits; ++s) {
                all.add(value[s], stats[s].y, exp2f(stats[s].x - highest));
            }
            if (!Long || n_clusters_ == 1) {
                store_combined<T, D>(args, out, i, highest, all);
                continue;
            }
            float *part = own_ + i / kDecodeThreads * kPartFloats;
            part[threadIdx.x] = all.value;
            if (starts_head<D>(i)) {
                reinterpret_cast<float2 *>(part + kDecodeThreads)[head_in_part<D>(i)] =
                    make_float2(highest, all.sum);
            }
        }
        if constexpr (Long) {
            if (n_clusters_ > 1) {
                finish_clusters(args, out);
            }
        }
    }

private:
    // Combines the clusters: by the last of the blocks of this rank.
    __device__ __forceinline__ void finish_clusters(const AttentionArgs &args, T *out) {
        __shared__ bool is_last;
        if (rank_ * kDecodeThreads >= group_ * D) { // owns no part
            return;
        }
        __threadfence();
        __syncthreads();
        if (threadIdx.x == 0) {
            is_last = atomicAdd(counter_, 1) == n_clusters_ - 1;
        }
        __syncthreads();
        if (!is_last) {
            return;
        }
        __threadfence();
        for (int own = 0; (own * n_ + rank_) * kDecodeThreads < group_ * D; ++own) {
            const int i = (own * n_ + rank_) * kDecodeThreads + int(threadIdx.x);
            if (i >= group_ * D) {
                break;
            }
            const float *part = first_ + i / kDecodeThreads * kPartFloats;
            const int64_t step = cluster_partial_floats<D>(group_);
            // kAtOnce clusters are loaded at a time; the sums are rescaled to the running maximum.
            constexpr int kAtOnce = 4;
            float highest = -INFINITY;
            WeightedSum all;
            for (int c0 = 0; c0 < n_clusters_; c0 += kAtOnce) {
                float value[kAtOnce];
                float2 stats[kAtOnce];
                float now = highest;
#pragma unroll
                for (int j = 0; j < kAtOnce; ++j) {
                    const float *at = part + min(c0 + j, n_clusters_ - 1) * step;
                    value[j] = __ldcg(at + threadIdx.x);
                    stats[j] = __ldcg(reinterpret_cast<const float2 *>(at + kDecodeThreads) +
                                      head_in_part<D>(i));
                    stats[j].x = c0 + j < n_clusters_ ? stats[j].x : -INFINITY;
                }
#pragma unroll
                for (int j = 0; j < kAtOnce; ++j) {
                    now = fmaxf(now, stats[j].x);
                }
                const float rescale = exp2f(highest - now);
                all.value *= rescale;
                all.sum *= rescale;
                highest = now;
#pragma unroll
                for (int j = 0; j < kAtOnce; ++j) {
                    all.add(value[j], stats[j].y, exp2f(stats[j].x - now));
                }
            }
            store_combined<T, D>(args, out, i, highest, all);
        }
        if (threadIdx.x == 0) {
            *counter_ = 0;
        }
    }
    static constexpr int kPartFloats = kPartBytes<D> / 4;
    __device__ __forceinline__ uint32_t part_address(int own, int split) const {
        return workspace_ + uint32_t((own * n_ + split) * kPartBytes<D>);
    }
    int group_, n_, n_splits_, rank_;
    uint32_t workspace_, barrier_;
    int n_clusters_ = 1; // with splits of the token
    float *first_ = nullptr, *own_ = nullptr;
    int32_t *counter_ = nullptr;
};

#else

template <typename T, int D, int Heads, bool Long> class SplitCombine {
public:
    __device__ __forceinline__ SplitCombine(const AttentionArgs &args, const SplitKv &splits,
                                            int n_splits, uint32_t, uint32_t)
        : group_(args.group), n_splits_(n_splits) {
        const int64_t unit = int64_t(blockIdx.z) * args.kv_heads + blockIdx.y;
        parts_ = splits.partial + unit * splits.n * kPart;
        counter_ = splits.counters + unit * splits.n;
    }
    __device__ __forceinline__ bool has_splits() const { return true; }
    __device__ __forceinline__ void init() {}
    __device__ __forceinline__ void wait_peers() {}
    __device__ __forceinline__ void store_partial(int i, float value, float top, float sum) {
        float *head = parts_ + int64_t(blockIdx.x) * kPart + i / D * (D + 2);
        head[i % D] = value;
        if (i % D == 0) {
            head[D] = top;
            head[D + 1] = sum;
        }
    }
    __device__ __forceinline__ void finish(const AttentionArgs &args, T *out,
                                           const unsigned char *) {
        __shared__ bool is_last;
        if (int(blockIdx.x) >= n_splits_) {
            return;
        }
        __threadfence();
        __syncthreads();
        if (threadIdx.x == 0) {
            is_last = atomicAdd(counter_, 1) == n_splits_ - 1;
        }
        __syncthreads();
        if (!is_last) {
            return;
        }
        __threadfence();
        for (int i = threadIdx.x; i < group_ * D; i += kDecodeThreads) {
            const float *part = parts_ + i / D * (D + 2);
            float highest = -INFINITY;
            for (int s = 0; s < n_splits_; ++s) {
                highest = fmaxf(highest, __ldcg(part + int64_t(s) * kPart + D));
            }
            WeightedSum all;
            for (int s = 0; s < n_splits_; ++s) {
                const float *at = part + int64_t(s) * kPart;
                all.add(__ldcg(at + i % D), __ldcg(at + D + 1), exp2f(__ldcg(at + D) - highest));
            }
            store_combined<T, D>(args, out, i, highest, all);
        }
        if (threadIdx.x == 0) {
            *counter_ = 0;
        }
    }

private:
    static constexpr int kPart = Heads * (D + 2);
    int group_, n_splits_;
    float *parts_;
    int32_t *counter_;
};

#endif

} // namespace llaisys::ops::cuda
