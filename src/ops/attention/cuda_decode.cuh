// One query token against its list: the keys are the 16-row operand of the tensor cores and the
// query heads of a group its 8 columns, so that nothing is wasted on one token.
//
// Grid (split, key/value head, token), 4 warps. A warp streams tiles of 16 keys and values through a
// ring of its own (2 or 3 slots of 2 * 16 * D values, cp.async) and keeps scores^T, a running maximum and
// out^T [D, 8 heads] in registers. The warps are merged in shared memory, the splits by
// cuda_decode_merge.cuh, always in their order. Bound by memory: 2 blocks a processor keep about 128 KB
// on their way.
#pragma once

#include "ops/attention/cuda_args.cuh"
#include "ops/attention/cuda_decode_merge.cuh"

#include <algorithm>

namespace llaisys::ops::cuda {

constexpr int kDecodeKeys = 16;    // of a tile
constexpr int kDecodeMinTiles = 8; // of a split: less does not pay for the merge

// What may be tried out; the defaults are what runs.
struct DecodeTuning {
    int stages = 0; // slots of a warp's ring, 2 or 3; 0: by how many tokens there are
};

template <int D, int Stages>
constexpr int kDecodeRingBytes = kDecodeWarps * Stages * 2 * kDecodeKeys * D * 2;

// Scores, maximum, sum and output of one warp.
template <typename T, int D, int HeadTiles> struct DecodeState {
    float out[HeadTiles][D / 16][4] = {};
    float max[HeadTiles][2];
    float sum[HeadTiles][2] = {};

    __device__ __forceinline__ DecodeState() {
        for (int h = 0; h < HeadTiles; ++h) {
            max[h][0] = max[h][1] = -INFINITY;
        }
    }

    // keys, values: tiles in shared memory. first: the entry of the tile's first key.
    __device__ __forceinline__ void add(uint32_t keys, uint32_t values,
                                        const uint32_t (&q)[HeadTiles][D / 16][2], int first,
                                        int begin, int end, float scale) {
        const int lane = threadIdx.x % kWarp;
        const int matrix = lane / 8;
        float scores[HeadTiles][4] = {};
#pragma unroll
        for (int step = 0; step < D / 16; ++step) {
            uint32_t a[4];
            const int row = (matrix & 1) * 8 + lane % 8;
            load_matrices(a, keys + tile_offset<D>(row, step * 2 + (matrix >> 1)));
#pragma unroll
            for (int h = 0; h < HeadTiles; ++h) {
                mma<T>(scores[h], a, q[h][step][0], q[h][step][1]);
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
                const float s0 = sees_low ? scores[h][c] * scale : -INFINITY;
                const float s1 = sees_high ? scores[h][c + 2] * scale : -INFINITY;
                float top = fmaxf(s0, s1);
                top = fmaxf(top, __shfl_xor_sync(kAll, top, 4));
                top = fmaxf(top, __shfl_xor_sync(kAll, top, 8));
                top = fmaxf(top, __shfl_xor_sync(kAll, top, 16));
                const float now = fmaxf(max[h][c], top);
                const float safe = now == -INFINITY ? 0.0f : now;
                const float fade = exp2f(max[h][c] - safe);
                weights[c] = exp2f(s0 - safe);
                weights[c + 2] = exp2f(s1 - safe);
                sum[h][c] = sum[h][c] * fade + weights[c] + weights[c + 2];
                max[h][c] = now;
#pragma unroll
                for (int d = 0; d < D / 16; ++d) {
                    out[h][d][c] *= fade;
                    out[h][d][c + 2] *= fade;
                }
            }
            p[h][0] = transpose_matrix(pack_pair<T>(weights[0], weights[1]));
            p[h][1] = transpose_matrix(pack_pair<T>(weights[2], weights[3]));
        }
#pragma unroll
        for (int d = 0; d < D / 16; ++d) {
            uint32_t a[4];
            const int row = (matrix >> 1) * 8 + lane % 8;
            load_matrices_transposed(a, values + tile_offset<D>(row, d * 2 + (matrix & 1)));
#pragma unroll
            for (int h = 0; h < HeadTiles; ++h) {
                mma<T>(out[h][d], a, p[h][0], p[h][1]);
            }
        }
    }
};

// Streams this warp's tiles (first_tile + warp, + kDecodeWarps, ...) below last_tile into the state.
template <typename T, int D, int HeadTiles, int Stages>
__device__ __forceinline__ void decode_tiles(const AttentionArgs &args, const int32_t *table,
                                             int kv_head, int begin, int end, int first_tile,
                                             int last_tile, uint32_t ring, const T *query,
                                             DecodeState<T, D, HeadTiles> &state) {
    constexpr uint32_t kTile = kDecodeKeys * D * 2; // bytes
    constexpr int kChunks = D / 8;                  // of 16 bytes, a row
    const int lane = threadIdx.x % kWarp;
    const int warp = threadIdx.x / kWarp;
    const int n = (last_tile - first_tile - warp + kDecodeWarps - 1) / kDecodeWarps;
    const auto entry_of = [&](int i) {
        return (first_tile + warp + i * kDecodeWarps) * kDecodeKeys + lane % kDecodeKeys;
    };
    const auto slot_at = [&](int i) -> int64_t { // of key lane % 16 of tile i; -1: not seen
        const int e = entry_of(i);
        return i < n && e >= begin && e < end ? args.slot_of(table, e) : -1;
    };
    const auto fetch = [&](int i, int64_t slot) {
        if (i < n) {
            const uint32_t to = ring + uint32_t(i % Stages) * 2 * kTile;
#pragma unroll
            for (int c = lane; c < kDecodeKeys * kChunks; c += kWarp) {
                const int row = c / kChunks;
                const int64_t from = __shfl_sync(kAll, slot, row);
                const int64_t offset =
                    ((from < 0 ? 0 : from) * args.kv_heads + kv_head) * D + c % kChunks * 8;
                const uint32_t at = tile_offset<D>(row, c % kChunks);
                copy_async(to + at, static_cast<const T *>(args.k) + offset, from >= 0);
                copy_async(to + kTile + at, static_cast<const T *>(args.v) + offset, from >= 0);
            }
        }
        copies_end_group();
    };
    // The tile of the last entry is being written by the kernel before; the others are not.
    int64_t first_slots[Stages];
    bool is_fetched[Stages];
#pragma unroll
    for (int i = 0; i < Stages; ++i) {
        first_slots[i] = slot_at(i);
        const int tile_end = (first_tile + warp + i * kDecodeWarps + 1) * kDecodeKeys;
        is_fetched[i] = args.are_settled && i < n && tile_end < end;
        if (is_fetched[i]) {
            fetch(i, first_slots[i]);
        }
    }
    int64_t next = slot_at(Stages);
    if (args.are_settled) {
        wait_for_input();
    }
#pragma unroll
    for (int i = 0; i < Stages; ++i) {
        if (!is_fetched[i]) {
            fetch(i, first_slots[i]);
        }
    }
    uint32_t q[HeadTiles][D / 16][2];
#pragma unroll
    for (int h = 0; h < HeadTiles; ++h) {
        const int head = h * 8 + lane / 4;
        const T *from = query + int64_t(head) * args.q_head + lane % 4 * 2;
#pragma unroll
        for (int step = 0; step < D / 16; ++step) {
            const bool is_there = head < args.group;
            q[h][step][0] = is_there ? *reinterpret_cast<const uint32_t *>(from + step * 16) : 0u;
            q[h][step][1] =
                is_there ? *reinterpret_cast<const uint32_t *>(from + step * 16 + 8) : 0u;
        }
    }
    for (int i = 0; i < n; ++i) {
        copies_wait<Stages - 1>();
        __syncwarp();
        const uint32_t tile = ring + uint32_t(i % Stages) * 2 * kTile;
        const int first = (first_tile + warp + i * kDecodeWarps) * kDecodeKeys;
        state.add(tile, tile + kTile, q, first, begin, end, args.scale_log2);
        __syncwarp(); // before its slot is filled again
        fetch(i + Stages, next);
        next = slot_at(i + Stages + 1);
    }
    copies_wait<0>();
}

template <typename T, int D, int HeadTiles, int Stages>
__global__ void __launch_bounds__(kDecodeThreads, 2)
    attention_decode_kernel(AttentionArgs args, const int32_t *tokens, DecodeSplits splits) {
    constexpr int kHeads = 8 * HeadTiles;
    extern __shared__ __align__(128) unsigned char shared[];
    __shared__ float max_of[kDecodeWarps][kHeads];
    __shared__ float sum_of[kDecodeWarps][kHeads];
    __shared__ uint64_t merge_barrier;

    allow_next();
    if (!args.are_settled) {
        wait_for_input();
    }
    const int kv_head = blockIdx.y;
    const int split = blockIdx.x;
    const int token = tokens != nullptr ? tokens[blockIdx.z] : blockIdx.z;
    const int begin = args.begin[token];
    const int end = args.end[token];
    T *out = static_cast<T *>(args.out) + token * args.out_token +
             int64_t(kv_head) * args.group * args.out_head;
    if (end <= begin) {
        wait_for_input();
        for (int i = threadIdx.x; split == 0 && i < args.group * D; i += kDecodeThreads) {
            out[i / D * args.out_head + i % D] = from_float<T>(0.0f);
        }
        return;
    }
    const int tiles_begin = begin / kDecodeKeys;
    const int tiles_end = (end + kDecodeKeys - 1) / kDecodeKeys;
    const int n_tiles = tiles_end - tiles_begin;
    const int per_split = max((n_tiles + splits.n - 1) / splits.n, kDecodeMinTiles);
    const int n_splits = (n_tiles + per_split - 1) / per_split;
    constexpr int kPitch = D + 4;                    // of `outs`, so that no bank is met twice
    float *outs = reinterpret_cast<float *>(shared); // [warp][head][kPitch]
    const unsigned char *room = shared + kDecodeRingBytes<D, Stages>;
    SplitMerge<T, D, kHeads> merge(args, splits, n_splits, shared_address(room),
                                   shared_address(&merge_barrier));
    if (n_splits > 1) {
        merge.begin();
    }
    if (split >= n_splits) {
        wait_for_input(); // who does not wait lets the kernel after the next begin too early
        if (n_splits > 1) {
            merge.meet();
            merge.finish(out, args.out_head, room);
        }
        return;
    }

    const int lane = threadIdx.x % kWarp;
    const int warp = threadIdx.x / kWarp;
    DecodeState<T, D, HeadTiles> state;
    const T *q = static_cast<const T *>(args.q) + token * args.q_token +
                 int64_t(kv_head) * args.group * args.q_head;
    const uint32_t ring =
        shared_address(shared) + uint32_t(warp) * Stages * 2 * kDecodeKeys * D * 2;
    const int first_tile = tiles_begin + split * per_split;
    decode_tiles<T, D, HeadTiles, Stages>(args, args.table_of(token), kv_head, begin, end,
                                          first_tile, min(first_tile + per_split, tiles_end), ring,
                                          q, state);

    __syncthreads(); // before the ring becomes `outs`
#pragma unroll
    for (int h = 0; h < HeadTiles; ++h) {
#pragma unroll
        for (int c = 0; c < 2; ++c) {
            float sum = state.sum[h][c];
            sum += __shfl_xor_sync(kAll, sum, 4);
            sum += __shfl_xor_sync(kAll, sum, 8);
            sum += __shfl_xor_sync(kAll, sum, 16);
            const int head = h * 8 + lane % 4 * 2 + c;
            if (lane / 4 == 0) {
                max_of[warp][head] = state.max[h][c];
                sum_of[warp][head] = sum;
            }
#pragma unroll
            for (int d = 0; d < D / 16; ++d) {
                float *to = outs + (warp * kHeads + head) * kPitch + d * 16 + lane / 4;
                to[0] = state.out[h][d][c];
                to[8] = state.out[h][d][c + 2];
            }
        }
    }
    if (n_splits > 1) {
        merge.meet();
    }
    __syncthreads();
    for (int i = threadIdx.x; i < args.group * D; i += kDecodeThreads) {
        const int head = i / D;
        float top = max_of[0][head];
        for (int w = 1; w < kDecodeWarps; ++w) {
            top = fmaxf(top, max_of[w][head]);
        }
        float value = 0;
        float sum = 0;
        for (int w = 0; w < kDecodeWarps; ++w) {
            const float fade = exp2f(max_of[w][head] - top);
            value += outs[(w * kHeads + head) * kPitch + i % D] * fade;
            sum += sum_of[w][head] * fade;
        }
        if (n_splits == 1) {
            out[head * args.out_head + i % D] = from_float<T>(value / sum);
        } else {
            merge.give(i, value, top, sum);
        }
    }
    if (n_splits > 1) {
        merge.finish(out, args.out_head, room);
    }
}

// At most so many splits: 2 blocks a processor in all, a power of two that a cluster may have; of an
// exact stream always kMostSplits.
inline int decode_splits(const device::CudaStream &stream, int64_t units) {
    if (stream.is_exact) {
        return kMostSplits;
    }
    const int64_t wanted = std::max<int64_t>(2 * stream.n_processors / units, 1);
    int n = 1;
    while (n * 2 <= std::min<int64_t>(wanted, kMostSplits)) {
        n *= 2;
    }
    return n;
}

// Of any launch.
template <int D, int HeadTiles, int Stages> constexpr int most_decode_bytes(bool has_clusters) {
    return kDecodeRingBytes<D, Stages> +
           (has_clusters ? merge_bytes<D>(8 * HeadTiles, kMostSplits) : 0);
}

template <typename T, int D, int HeadTiles, int Stages>
void launch_decode(device::CudaStream &stream, const AttentionArgs &args, const int32_t *tokens,
                   int64_t n_tokens, int n_splits) {
    const int64_t units = n_tokens * args.kv_heads;
    DecodeSplits splits{};
    splits.n = n_splits;
    const bool has_clusters = stream.has_early_launch;
    if (!has_clusters) {
        splits.partial = static_cast<float *>(stream.scratch.at_least(
            size_t(units * splits.n * 8 * HeadTiles * (D + 2)) * sizeof(float)));
        splits.counters =
            static_cast<int32_t *>(stream.counters.at_least(size_t(units) * sizeof(int32_t)));
    }
    const auto kernel = attention_decode_kernel<T, D, HeadTiles, Stages>;
    allow_shared(kernel, size_t(most_decode_bytes<D, HeadTiles, Stages>(has_clusters)));
    const int bytes =
        kDecodeRingBytes<D, Stages> + (has_clusters ? merge_bytes<D>(args.group, splits.n) : 0);
    const dim3 grid(unsigned(splits.n), unsigned(args.kv_heads), unsigned(n_tokens));
    launch(stream, kernel, grid, kDecodeThreads, size_t(bytes),
           {true, has_clusters ? unsigned(splits.n) : 1u}, args, tokens, splits);
}

// n_tokens single tokens; `tokens`: which, null: the first.
template <typename T, int D, int HeadTiles>
void run_decode(device::CudaStream &stream, const AttentionArgs &args, const int32_t *tokens,
                int64_t n_tokens, const DecodeTuning &tuning = {}) {
    const int64_t units = n_tokens * args.kv_heads;
    const int n = decode_splits(stream, units);
    // Few tokens have short splits: what counts is that blocks fit beside those of the kernel before. Devices
    // with 99 KB a block have room for no more, either.
    constexpr int kOwnShared = 2 << 10; // what the kernel has of its own, at most
    const bool are_few = 2 * stream.n_processors / units >= 4;
    const bool has_room =
        most_decode_bytes<D, HeadTiles, 3>(stream.has_early_launch) + kOwnShared <=
        stream.max_shared_bytes;
    if (tuning.stages == 2 || (tuning.stages == 0 && are_few) || !has_room) {
        launch_decode<T, D, HeadTiles, 2>(stream, args, tokens, n_tokens, n);
    } else {
        launch_decode<T, D, HeadTiles, 3>(stream, args, tokens, n_tokens, n);
    }
}

} // namespace llaisys::ops::cuda
