// Prefill attention with mma.sync: runs of consecutive query tokens of a sequence, 128 rows
// (token, head of the group) per block against tiles of 64 keys.
//
// Grid (tile of the run, KV head, run), 8 warps of 16 rows. Keys and values have two pipeline
// stages of 2 * 64 * D values (cp.async); queries, scores and output of a warp stay in registers.
// Bound: mma.sync throughput and shared memory bandwidth (each warp reads every key for 16 rows
// only).
#pragma once

#include "ops/attention/cuda_args.cuh"

namespace llaisys::ops::cuda {

constexpr int kPrefillWarps = 8;
constexpr int kPrefillRows = kPrefillWarps * 16;
constexpr int kPrefillKeys = 64;
constexpr int kPrefillThreads = kPrefillWarps * kWarpSize;

template <int D> constexpr int prefill_shared_bytes() {
    return 2 * 2 * kPrefillKeys * kTileRowBytes<D>;
}

// Rows g and g + 8 of a warp (g: lane / 4), columns in pairs.
template <typename T, int D> struct PrefillState {
    float out[D / 8][4] = {};
    float max[2] = {-INFINITY, -INFINITY};
    float sum[2] = {};

    // begins, ends: visible range of the two rows. is_whole: every row of the block sees the
    // whole tile.
    __device__ __forceinline__ void add(uint32_t keys, uint32_t values,
                                        const uint32_t (&q)[D / 16][4], int first,
                                        const int (&begins)[2], const int (&ends)[2], bool is_whole,
                                        float scale, float cap_scale) {
        constexpr int kTiles = kPrefillKeys / 8;
        const int lane = threadIdx.x % kWarpSize;
        const int matrix = lane / 8;
        float scores[kTiles][4] = {};
#pragma unroll
        for (int step = 0; step < D / 16; ++step) {
#pragma unroll
            for (int pair = 0; pair < kTiles / 2; ++pair) {
                uint32_t b[4];
                const int row = pair * 16 + (matrix >> 1) * 8 + lane % 8;
                ldmatrix_x4(b, keys + tile_offset<D>(row, step * 2 + (matrix & 1)));
                mma_m16n8k16<T>(scores[2 * pair], q[step], b[0], b[1]);
                mma_m16n8k16<T>(scores[2 * pair + 1], q[step], b[2], b[3]);
            }
        }
        if (cap_scale != 0) {
#pragma unroll
            for (int i = 0; i < kTiles * 4; ++i) {
                scores[i / 4][i % 4] = soft_capped(scores[i / 4][i % 4], cap_scale);
            }
        }
        if (!is_whole) {
#pragma unroll
            for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll
                for (int c = 0; c < 4; ++c) {
                    const int e = first + tile * 8 + lane % 4 * 2 + (c & 1);
                    if (e < begins[c >> 1] || e >= ends[c >> 1]) {
                        scores[tile][c] = -INFINITY;
                    }
                }
            }
        }
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            float top = -INFINITY;
#pragma unroll
            for (int tile = 0; tile < kTiles; ++tile) {
                top = fmaxf(top, fmaxf(scores[tile][2 * r], scores[tile][2 * r + 1]));
            }
            top = fmaxf(top, __shfl_xor_sync(kFullMask, top, 1));
            top = fmaxf(top, __shfl_xor_sync(kFullMask, top, 2));
            const float now = fmaxf(max[r], top * scale); // scale is positive
            const float safe = now == -INFINITY ? 0.0f : now;
            const float rescale = exp2f(max[r] - safe);
            max[r] = now;
            float added = 0;
#pragma unroll
            for (int tile = 0; tile < kTiles; ++tile) {
                scores[tile][2 * r] = exp2f(fmaf(scores[tile][2 * r], scale, -safe));
                scores[tile][2 * r + 1] = exp2f(fmaf(scores[tile][2 * r + 1], scale, -safe));
                added += scores[tile][2 * r] + scores[tile][2 * r + 1];
            }
            sum[r] = sum[r] * rescale + added;
#pragma unroll
            for (int d = 0; d < D / 8; ++d) {
                out[d][2 * r] *= rescale;
                out[d][2 * r + 1] *= rescale;
            }
        }
#pragma unroll
        for (int pair = 0; pair < kTiles / 2; ++pair) {
            const uint32_t p[4] = {pack_pair<T>(scores[2 * pair][0], scores[2 * pair][1]),
                                   pack_pair<T>(scores[2 * pair][2], scores[2 * pair][3]),
                                   pack_pair<T>(scores[2 * pair + 1][0], scores[2 * pair + 1][1]),
                                   pack_pair<T>(scores[2 * pair + 1][2], scores[2 * pair + 1][3])};
#pragma unroll
            for (int d = 0; d < D / 16; ++d) {
                uint32_t b[4];
                const int row = pair * 16 + (matrix & 1) * 8 + lane % 8;
                ldmatrix_x4_trans(b, values + tile_offset<D>(row, d * 2 + (matrix >> 1)));
                mma_m16n8k16<T>(out[2 * d], p, b[0], b[1]);
                mma_m16n8k16<T>(out[2 * d + 1], p, b[2], b[3]);
            }
        }
    }
};

template <typename T, int D>
__global__ void __launch_bounds__(kPrefillThreads, 1)
    attention_prefill_kernel(AttentionArgs args, const int32_t *runs) {
    constexpr int kChunks = D / 8;
    constexpr uint32_t kTile = kPrefillKeys * kTileRowBytes<D>; // bytes
    extern __shared__ __align__(128) unsigned char shared[];
    __shared__ int slots[2][kPrefillKeys];
    __shared__ int seen[4]; // smallest and largest begin and end of the tokens

    const int first_token = runs[2 * blockIdx.z];
    const int run_tokens = runs[2 * blockIdx.z + 1];
    const int tile_tokens = kPrefillRows / args.group;
    const int tile = int(gridDim.x) - 1 - int(blockIdx.x); // longest sequences first
    const int from_token = tile * tile_tokens;
    if (from_token >= run_tokens) {
        return;
    }
    const int n_tokens = min(tile_tokens, run_tokens - from_token);
    const int token0 = first_token + from_token;
    const int kv_head = blockIdx.y;
    const int lane = threadIdx.x % kWarpSize;
    const int warp = threadIdx.x / kWarpSize;

    if (threadIdx.x < kWarpSize) {
        int low_begin = INT32_MAX, high_begin = 0, low_end = INT32_MAX, high_end = 0;
        for (int t = lane; t < n_tokens; t += kWarpSize) {
            low_begin = min(low_begin, args.begin[token0 + t]);
            high_begin = max(high_begin, args.begin[token0 + t]);
            low_end = min(low_end, args.end[token0 + t]);
            high_end = max(high_end, args.end[token0 + t]);
        }
        low_begin = __reduce_min_sync(kFullMask, low_begin);
        high_begin = __reduce_max_sync(kFullMask, high_begin);
        low_end = __reduce_min_sync(kFullMask, low_end);
        high_end = __reduce_max_sync(kFullMask, high_end);
        if (lane == 0) {
            seen[0] = low_begin;
            seen[1] = high_begin;
            seen[2] = low_end;
            seen[3] = high_end;
        }
    }
    // This lane's rows and their queries.
    int begins[2], ends[2];
    int64_t out_at[2];
    uint32_t q[D / 16][4];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        const int row = warp * 16 + r * 8 + lane / 4;
        const int token = token0 + row / args.group;
        const int head = kv_head * args.group + row % args.group;
        const bool is_there = row < n_tokens * args.group;
        begins[r] = is_there ? args.begin[token] : 0;
        ends[r] = is_there ? args.end[token] : 0;
        out_at[r] = is_there ? token * args.out_token + head * args.out_head : -1;
        const T *from = static_cast<const T *>(args.q) + token * args.q_token + head * args.q_head;
#pragma unroll
        for (int step = 0; step < D / 16; ++step) {
            const uint32_t *pair = reinterpret_cast<const uint32_t *>(from + step * 16) + lane % 4;
            q[step][r] = is_there ? pair[0] : 0u;
            q[step][r + 2] = is_there ? pair[4] : 0u;
        }
    }
    __syncthreads();
    const int low_begin = seen[0], high_begin = seen[1], low_end = seen[2], high_end = seen[3];
    const int first_tile = low_begin / kPrefillKeys;
    const int last_tile = (high_end + kPrefillKeys - 1) / kPrefillKeys;
    const int32_t *table = args.table_of(token0);

    const auto find_slots = [&](int at) { // KV slots of tile `at`, into slots[at % 2]
        if (threadIdx.x < kPrefillKeys && at < last_tile) {
            const int e = at * kPrefillKeys + threadIdx.x;
            slots[at & 1][threadIdx.x] =
                e >= low_begin && e < high_end ? int(args.slot_of(table, e)) : -1;
        }
    };
    const auto fetch = [&](int at) {
        if (at < last_tile) {
            const uint32_t to = smem_address(shared) + uint32_t(at & 1) * 2 * kTile;
#pragma unroll
            for (int c = threadIdx.x; c < kPrefillKeys * kChunks; c += kPrefillThreads) {
                const int row = c / kChunks;
                const int slot = slots[at & 1][row];
                const int64_t offset =
                    (int64_t(slot < 0 ? 0 : slot) * args.kv_heads + kv_head) * D + c % kChunks * 8;
                const uint32_t place = tile_offset<D>(row, c % kChunks);
                cp_async_16(to + place, static_cast<const T *>(args.k) + offset, slot >= 0);
                cp_async_16(to + kTile + place, static_cast<const T *>(args.v) + offset, slot >= 0);
            }
        }
        cp_async_commit_group();
    };

    PrefillState<T, D> state;
    find_slots(first_tile);
    __syncthreads();
    fetch(first_tile);
    find_slots(first_tile + 1);
    for (int at = first_tile; at < last_tile; ++at) {
        cp_async_wait_group<0>();
        __syncthreads(); // tile `at` has arrived; the other stage and slots[at % 2] are free
        fetch(at + 1);
        find_slots(at + 2);
        const int first = at * kPrefillKeys;
        const bool is_whole = first >= high_begin && first + kPrefillKeys <= low_end;
        const uint32_t keys = smem_address(shared) + uint32_t(at & 1) * 2 * kTile;
        state.add(keys, keys + kTile, q, first, begins, ends, is_whole, args.scale_log2,
                  args.cap_scale);
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        float sum = state.sum[r];
        sum += __shfl_xor_sync(kFullMask, sum, 1);
        sum += __shfl_xor_sync(kFullMask, sum, 2);
        const int head = kv_head * args.group + (warp * 16 + r * 8 + lane / 4) % args.group;
        const float factor = sum > 0 ? 1.0f / args.with_sink(head, state.max[r], sum) : 0.0f;
        if (out_at[r] >= 0) {
            T *to = static_cast<T *>(args.out) + out_at[r] + lane % 4 * 2;
#pragma unroll
            for (int d = 0; d < D / 8; ++d) {
                *reinterpret_cast<uint32_t *>(to + d * 8) =
                    pack_pair<T>(state.out[d][2 * r] * factor, state.out[d][2 * r + 1] * factor);
            }
        }
    }
}

} // namespace llaisys::ops::cuda
