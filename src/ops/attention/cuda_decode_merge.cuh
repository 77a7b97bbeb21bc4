// Merges the splits of a token that cuda_decode.cuh has made, in their order.
//
// On compute capability 9 the splits of a token and key/value head are one cluster. The outputs are cut into
// pieces of 128 values, piece p belongs to block p % n: each block stores its sums in the shared memory of the
// block that has the piece, which waits for all of them and merges. On 8 the sums go through memory, and
// whichever block comes last merges all.
#pragma once

#include "ops/attention/cuda_args.cuh"
#include "ops/cuda/cluster.cuh"

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

// What a block of n splits has room for: the values of its pieces by split, and maximum and sum of the heads
// of a piece.
template <int D> constexpr int kPieceHeads = kDecodeThreads / D;
template <int D> constexpr int kPieceBytes = kDecodeThreads * 4 + kPieceHeads<D> * 8;
template <int D> constexpr int merge_bytes(int group, int n) {
    const int pieces = (group * D + kDecodeThreads - 1) / kDecodeThreads;
    return n == 1 ? 0 : (pieces + n - 1) / n * n * kPieceBytes<D>;
}

#if __CUDA_ARCH__ >= 900

// Of a token and head with n_splits > 1, used by all threads of all its blocks, also of those that have no
// split. room: merge_bytes, on 8 bytes; barrier: in shared memory.
template <typename T, int D, int Heads> class SplitMerge {
public:
    __device__ __forceinline__ SplitMerge(const AttentionArgs &args, const DecodeSplits &splits,
                                          int n_splits, uint32_t room, uint32_t barrier)
        : group_(args.group), n_(splits.n), n_splits_(n_splits), rank_(int(blockIdx.x)),
          room_(room), barrier_(barrier) {}
    __device__ __forceinline__ void begin() {
        if (threadIdx.x == 0) {
            barrier_init(barrier_, 1);
            barriers_are_made();
            int values = 0;
            for (int piece = rank_; piece * kDecodeThreads < group_ * D; piece += n_) {
                values += min(kDecodeThreads, group_ * D - piece * kDecodeThreads);
            }
            barrier_arrive_expecting(barrier_, uint32_t(n_splits_ * (values * 4 + values / D * 8)));
        }
        cluster_arrive();
    }
    // After begin and before the first give: all blocks have their barriers.
    __device__ __forceinline__ void meet() { cluster_wait(); }
    // Value i [group, D] of this block's split, with its head's maximum and sum.
    __device__ __forceinline__ void give(int i, float value, float top, float sum) {
        const int piece = i / kDecodeThreads;
        const auto to = uint32_t(piece % n_);
        const uint32_t at = address_in_block(place(piece / n_, int(blockIdx.x)), to);
        const uint32_t barrier = address_in_block(barrier_, to);
        store_in_block(at + uint32_t(i % kDecodeThreads) * 4, value, barrier);
        if (i % D == 0) {
            store_in_block(at + kDecodeThreads * 4 + uint32_t(i % kDecodeThreads / D) * 8,
                           make_float2(top, sum), barrier);
        }
    }
    __device__ __forceinline__ void finish(T *out, int64_t out_head, const unsigned char *room) {
        barrier_wait_cluster(barrier_, 0);
        for (int own = 0; (own * n_ + rank_) * kDecodeThreads < group_ * D; ++own) {
            const int i = (own * n_ + rank_) * kDecodeThreads + int(threadIdx.x);
            if (i >= group_ * D) {
                break;
            }
            float2 stats[kMostSplits];
            float value[kMostSplits];
#pragma unroll
            for (int s = 0; s < kMostSplits; ++s) {
                const unsigned char *at = room + (place(own, min(s, n_splits_ - 1)) - room_);
                const bool is_there = s < n_splits_;
                value[s] = is_there ? reinterpret_cast<const float *>(at)[threadIdx.x] : 0.0f;
                stats[s] =
                    is_there
                        ? reinterpret_cast<const float2 *>(at + kDecodeThreads * 4)[threadIdx.x / D]
                        : make_float2(-INFINITY, 0.0f);
            }
            float highest = stats[0].x;
#pragma unroll
            for (int s = 1; s < kMostSplits; ++s) {
                highest = fmaxf(highest, stats[s].x);
            }
            SplitSum all;
#pragma unroll
            for (int s = 0; s < kMostSplits; ++s) {
                all.add(value[s], stats[s].y, exp2f(stats[s].x - highest));
            }
            out[i / D * out_head + i % D] = from_float<T>(all.value / all.sum);
        }
    }

private:
    __device__ __forceinline__ uint32_t place(int own, int split) const {
        return room_ + uint32_t((own * n_ + split) * kPieceBytes<D>);
    }
    int group_, n_, n_splits_, rank_;
    uint32_t room_, barrier_;
};

#else

template <typename T, int D, int Heads> class SplitMerge {
public:
    __device__ __forceinline__ SplitMerge(const AttentionArgs &args, const DecodeSplits &splits,
                                          int n_splits, uint32_t, uint32_t)
        : group_(args.group), n_splits_(n_splits) {
        const int64_t unit = int64_t(blockIdx.z) * args.kv_heads + blockIdx.y;
        parts_ = splits.partial + unit * splits.n * kPart;
        counter_ = splits.counters + unit;
    }
    __device__ __forceinline__ void begin() {}
    __device__ __forceinline__ void meet() {}
    __device__ __forceinline__ void give(int i, float value, float top, float sum) {
        float *head = parts_ + int64_t(blockIdx.x) * kPart + i / D * (D + 2);
        head[i % D] = value;
        if (i % D == 0) {
            head[D] = top;
            head[D + 1] = sum;
        }
    }
    __device__ __forceinline__ void finish(T *out, int64_t out_head, const unsigned char *) {
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
            SplitSum all;
            for (int s = 0; s < n_splits_; ++s) {
                const float *at = part + int64_t(s) * kPart;
                all.add(__ldcg(at + i % D), __ldcg(at + D + 1), exp2f(__ldcg(at + D) - highest));
            }
            out[i / D * out_head + i % D] = from_float<T>(all.value / all.sum);
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
