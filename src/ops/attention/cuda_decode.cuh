// Paged decode attention: one query token against its KV sequence. The keys are the 16-row
// operand of mma.sync and the query heads of a group its 8 columns.
//
// Grid (split, KV head, token), 4 warps, or 2 without splits. Each warp streams tiles of 16 keys and
// values through its own pipeline (2 or 3 stages of 2 * 16 * D values, cp.async) and keeps scores^T,
// a running maximum and out^T [D, 8 heads] in registers (online softmax). The warps are combined in
// shared memory, the splits by cuda_decode_combine.cuh, in a fixed order. Bound: DRAM bandwidth;
// the blocks of an SM keep about 192 KB in flight. 8-bit caches: cuda_decode_bytes.cuh.
#pragma once

#include "ops/attention/cuda_decode_bytes.cuh"
#include "ops/attention/cuda_decode_combine.cuh"

#include <type_traits>

namespace llaisys::ops::cuda {

// per split: shorter splits cost more in the combine than they gain
constexpr int kDecodeMinTiles = 8;

// A tile of keys and values of type T in shared memory.
template <typename T, int D> struct DecodeTile {
    static constexpr int kChunks = D / 8;                               // 16-byte chunks per row
    static constexpr uint32_t kValues = kDecodeKeys * kTileRowBytes<D>; // offset of the values
    static constexpr uint32_t kBytes = 2 * kValues;
    static __device__ __forceinline__ uint32_t offset(int row, int chunk) {
        return tile_offset<D>(row, chunk);
    }
};

// Cache: T, or the format of an 8-bit cache.
template <typename Cache, int D, int Stages, int Warps>
constexpr int kDecodePipelineBytes = Warps * Stages * int(DecodeTile<Cache, D>::kBytes);

// Online softmax state of one warp.
template <typename T, typename Cache, int D, int HeadTiles>
struct DecodeState : DecodeSums<D, HeadTiles> {
    using Sums = DecodeSums<D, HeadTiles>;
    using Sums::out, Sums::max, Sums::sum, Sums::q;
    static constexpr float unit = 1; // of out

    __device__ __forceinline__ void load_queries(const T *query, int64_t q_head, int group) {
        const int lane = threadIdx.x % kWarpSize;
#pragma unroll
        for (int h = 0; h < HeadTiles; ++h) {
            const int head = h * 8 + lane / 4;
            const T *from = query + int64_t(head) * q_head + lane % 4 * 2;
#pragma unroll
            for (int step = 0; step < D / 16; ++step) {
                const bool is_there = head < group;
                q[h][step][0] =
                    is_there ? *reinterpret_cast<const uint32_t *>(from + step * 16) : 0u;
                q[h][step][1] =
                    is_there ? *reinterpret_cast<const uint32_t *>(from + step * 16 + 8) : 0u;
            }
        }
    }
    // Index in the head of this lane's outputs out[][d][c] and out[][d][c + 2].
    static __device__ __forceinline__ int low_dim(int d) {
        return d * 16 + int(threadIdx.x) % kWarpSize / 4;
    }
    static __device__ __forceinline__ int high_dim(int d) { return low_dim(d) + 8; }

    // tile: in shared memory. first: position of its first key.
    __device__ __forceinline__ void add(uint32_t tile, int first, int begin, int end, float scale,
                                        float cap_scale) {
        const uint32_t keys = tile;
        const uint32_t values = tile + DecodeTile<T, D>::kValues;
        const int lane = threadIdx.x % kWarpSize;
        const int matrix = lane / 8;
        float scores[HeadTiles][4] = {};
#pragma unroll
        for (int step = 0; step < D / 16; ++step) {
            uint32_t a[4];
            const int row = (matrix & 1) * 8 + lane % 8;
            ldmatrix_x4(a, keys + tile_offset<D>(row, step * 2 + (matrix >> 1)));
#pragma unroll
            for (int h = 0; h < HeadTiles; ++h) {
                mma_m16n8k16<T>(scores[h], a, q[h][step][0], q[h][step][1]);
            }
        }
        const int low = first + lane / 4; // this lane's keys: low and low + 8
        const bool sees_low = low >= begin && low < end;
        const bool sees_high = low + 8 >= begin && low + 8 < end;
        uint32_t p[HeadTiles][2];
#pragma unroll
        for (int h = 0; h < HeadTiles; ++h) {
            float weights[4];
#pragma unroll
            for (int c = 0; c < 2; ++c) {
                const float s0 =
                    sees_low ? soft_capped(scores[h][c], cap_scale) * scale : -INFINITY;
                const float s1 =
                    sees_high ? soft_capped(scores[h][c + 2], cap_scale) * scale : -INFINITY;
                const float now = fmaxf(max[h][c], max_of_keys(fmaxf(s0, s1)));
                const float safe = now == -INFINITY ? 0.0f : now;
                const float rescale = exp2f(max[h][c] - safe);
                weights[c] = exp2f(s0 - safe);
                weights[c + 2] = exp2f(s1 - safe);
                sum[h][c] = sum[h][c] * rescale + weights[c] + weights[c + 2];
                max[h][c] = now;
#pragma unroll
                for (int d = 0; d < D / 16; ++d) {
                    out[h][d][c] *= rescale;
                    out[h][d][c + 2] *= rescale;
                }
            }
            p[h][0] = movmatrix_trans(pack_pair<T>(weights[0], weights[1]));
            p[h][1] = movmatrix_trans(pack_pair<T>(weights[2], weights[3]));
        }
#pragma unroll
        for (int d = 0; d < D / 16; ++d) {
            uint32_t a[4];
            const int row = (matrix >> 1) * 8 + lane % 8;
            ldmatrix_x4_trans(a, values + tile_offset<D>(row, d * 2 + (matrix & 1)));
#pragma unroll
            for (int h = 0; h < HeadTiles; ++h) {
                mma_m16n8k16<T>(out[h][d], a, p[h][0], p[h][1]);
            }
        }
    }
};

// Streams this warp's tiles (first_tile + warp, + Warps, ...) below last_tile into the state.
template <typename T, typename Cache, int D, int HeadTiles, int Stages, int Warps>
__device__ __forceinline__ void decode_tiles(const AttentionArgs &args, const int32_t *table,
                                             int kv_head, int begin, int end, int first_tile,
                                             int last_tile, uint32_t buffer, const T *query,
                                             DecodeState<T, Cache, D, HeadTiles> &state) {
    using Tile = DecodeTile<Cache, D>;
    constexpr int kChunks = Tile::kChunks;
    constexpr int kRow = std::is_same_v<T, Cache> ? 2 * D : D; // bytes
    const int lane = threadIdx.x % kWarpSize;
    const int warp = threadIdx.x / kWarpSize;
    const int n = (last_tile - first_tile - warp + Warps - 1) / Warps;
    const auto entry_of = [&](int i) {
        return (first_tile + warp + i * Warps) * kDecodeKeys + lane % kDecodeKeys;
    };
    const auto slot_at = [&](int i) -> int { // KV slot of key lane % 16 of tile i; -1: masked
        const int e = entry_of(i);
        return i < n && e >= begin && e < end ? int(args.slot_of(table, e)) : -1;
    };
    const auto fetch = [&](int i, int slot) {
        if (i < n) {
            const uint32_t to = buffer + uint32_t(i % Stages) * Tile::kBytes;
#pragma unroll
            for (int c0 = 0; c0 < kDecodeKeys * kChunks; c0 += kWarpSize) {
                const int c = c0 + lane;
                const int row = c / kChunks;
                const int from = __shfl_sync(kFullMask, slot, row);
                const int64_t offset =
                    (int64_t(from < 0 ? 0 : from) * args.kv_heads + kv_head) * kRow +
                    c % kChunks * 16;
                const uint32_t at = Tile::offset(row, c % kChunks);
                if (kDecodeKeys * kChunks % kWarpSize == 0 || c < kDecodeKeys * kChunks) {
                    cp_async_16(to + at, static_cast<const char *>(args.k) + offset, from >= 0);
                    cp_async_16(to + Tile::kValues + at, static_cast<const char *>(args.v) + offset,
                                from >= 0);
                }
            }
            if constexpr (!std::is_same_v<T, Cache>) { // scales of the keys, then of the values
                const float *scales = lane < kDecodeKeys ? args.k_scales : args.v_scales;
                cp_async_4(to + Tile::kScales + uint32_t(lane) * 4,
                           scales + kv_head * args.n_slots + (slot < 0 ? 0 : slot), slot >= 0);
            }
        }
        cp_async_commit_group();
    };
    // The previous kernel writes the tile of the last position; the other tiles may be
    // prefetched.
    int first_slots[Stages];
    bool is_prefetched[Stages];
#pragma unroll
    for (int i = 0; i < Stages; ++i) {
        first_slots[i] = slot_at(i);
        const int tile_end = (first_tile + warp + i * Warps + 1) * kDecodeKeys;
        is_prefetched[i] = args.are_settled && i < n && tile_end < end;
        if (is_prefetched[i]) {
            fetch(i, first_slots[i]);
        }
    }
    int next = slot_at(Stages);
    if (args.are_settled) {
        grid_dependency_wait();
    }
#pragma unroll
    for (int i = 0; i < Stages; ++i) {
        if (!is_prefetched[i]) {
            fetch(i, first_slots[i]);
        }
    }
    state.load_queries(query, args.q_head, args.group);
    for (int i = 0; i < n; ++i) {
        cp_async_wait_group<Stages - 1>();
        __syncwarp();
        const uint32_t tile = buffer + uint32_t(i % Stages) * Tile::kBytes;
        const int first = (first_tile + warp + i * Warps) * kDecodeKeys;
        state.add(tile, first, begin, end, args.scale_log2, args.cap_scale);
        __syncwarp(); // before the stage is refilled
        fetch(i + Stages, next);
        next = slot_at(i + Stages + 1);
    }
    cp_async_wait_group<0>();
}

// Cache: T, or the format of an 8-bit cache. Long: with several clusters per token and KV head.
// Warps: kDecodeWarps, or fewer without splits.
template <typename T, typename Cache, int D, int HeadTiles, int Stages, bool Long, int Warps>
__global__ void __launch_bounds__(Warps *kWarpSize, 8 / Warps)
    attention_decode_kernel(AttentionArgs args, const int32_t *tokens, SplitKv splits) {
    constexpr int kHeads = 8 * HeadTiles;
    constexpr int kThreads = Warps * kWarpSize;
    constexpr bool kCanSplit = Warps == kDecodeWarps;
    extern __shared__ __align__(128) unsigned char shared[];
    __shared__ float max_of[Warps][kHeads];
    __shared__ float sum_of[Warps][kHeads];
    __shared__ uint64_t combine_barrier;

    launch_dependents();
    if (!args.are_settled) {
        grid_dependency_wait();
    }
    const int kv_head = blockIdx.y;
    const int split = blockIdx.x;
    const int token = tokens != nullptr ? tokens[blockIdx.z] : blockIdx.z;
    const int begin = args.begin[token];
    const int end = args.end[token];
    T *out = static_cast<T *>(args.out) + token * args.out_token +
             int64_t(kv_head) * args.group * args.out_head;
    if (end <= begin) {
        grid_dependency_wait();
        for (int i = threadIdx.x; split == 0 && i < args.group * D; i += kThreads) {
            out[i / D * args.out_head + i % D] = from_float<T>(0.0f);
        }
        return;
    }
    const int tiles_begin = begin / kDecodeKeys;
    const int tiles_end = (end + kDecodeKeys - 1) / kDecodeKeys;
    const int n_tiles = tiles_end - tiles_begin;
    const int max_splits = !kCanSplit ? 1 : Long ? splits.n * splits.clusters : splits.n;
    const int per_split = max((n_tiles + max_splits - 1) / max_splits, kDecodeMinTiles);
    const int n_splits = kCanSplit ? (n_tiles + per_split - 1) / per_split : 1;
    constexpr int kPitch = D + 4;                    // row pitch of `outs`, avoids bank conflicts
    float *outs = reinterpret_cast<float *>(shared); // [warp][head][kPitch]
    const unsigned char *workspace = shared + kDecodePipelineBytes<Cache, D, Stages, Warps>;
    SplitCombine<T, D, kHeads, Long> combine(args, splits, n_splits, smem_address(workspace),
                                             smem_address(&combine_barrier));
    const bool is_split = n_splits > 1 && combine.has_splits();
    if (is_split) {
        combine.init();
    }
    if (split >= n_splits) {
        // Every block waits: otherwise the next but one kernel could start too early.
        grid_dependency_wait();
        if (is_split) {
            combine.wait_peers();
            combine.finish(args, out, workspace);
        }
        return;
    }

    const int lane = threadIdx.x % kWarpSize;
    const int warp = threadIdx.x / kWarpSize;
    DecodeState<T, Cache, D, HeadTiles> state;
    const T *q = static_cast<const T *>(args.q) + token * args.q_token +
                 int64_t(kv_head) * args.group * args.q_head;
    const uint32_t buffer =
        smem_address(shared) + uint32_t(warp) * Stages * DecodeTile<Cache, D>::kBytes;
    const int first_tile = tiles_begin + split * per_split;
    const int last_tile = kCanSplit ? min(first_tile + per_split, tiles_end) : tiles_end;
    decode_tiles<T, Cache, D, HeadTiles, Stages, Warps>(
        args, args.table_of(token), kv_head, begin, end, first_tile, last_tile, buffer, q, state);

    __syncthreads(); // before the pipeline buffer is reused as `outs`
#pragma unroll
    for (int h = 0; h < HeadTiles; ++h) {
#pragma unroll
        for (int c = 0; c < 2; ++c) {
            const float sum = sum_of_keys(state.sum[h][c]);
            const int head = h * 8 + lane % 4 * 2 + c;
            if (lane / 4 == 0) {
                max_of[warp][head] = state.max[h][c];
                sum_of[warp][head] = sum;
            }
#pragma unroll
            for (int d = 0; d < D / 16; ++d) {
                float *to = outs + (warp * kHeads + head) * kPitch;
                to[state.low_dim(d)] = state.out[h][d][c] * state.unit;
                to[state.high_dim(d)] = state.out[h][d][c + 2] * state.unit;
            }
        }
    }
    if (is_split) {
        combine.wait_peers();
    }
    __syncthreads();
    for (int i = threadIdx.x; i < args.group * D; i += kThreads) {
        const int head = i / D;
        float top = max_of[0][head];
        for (int w = 1; w < Warps; ++w) {
            top = fmaxf(top, max_of[w][head]);
        }
        float value = 0;
        float sum = 0;
        for (int w = 0; w < Warps; ++w) {
            const float rescale = exp2f(max_of[w][head] - top);
            value += outs[(w * kHeads + head) * kPitch + i % D] * rescale;
            sum += sum_of[w][head] * rescale;
        }
        if (n_splits == 1) {
            const float total = args.with_sink(kv_head * args.group + head, top, sum);
            out[head * args.out_head + i % D] = from_float<T>(value / total);
        } else {
            combine.store_partial(i, value, top, sum);
        }
    }
    if (is_split) {
        combine.finish(args, out, workspace);
    }
}

} // namespace llaisys::ops::cuda
