// Runs of neighbouring query tokens of one list on compute capability 9.0: 128 rows (token, head of the
// group) a block against tiles of 128 keys, on wgmma.
//
// Grid (key/value head, tile of the run, run), the tiles with the longest lists first. Two warpgroups
// compute, 64 rows each; a third copies keys and values (cuda_prefill_copy.cuh) into a ring of 5 tiles that
// alternate: keys, values, keys, .. Queries lie in shared memory; scores, weights and the output of a
// warpgroup stay in registers. The scores of a tile are under way while the values of the one before are
// added, and the softmax runs beside that. Tiles count from entry 0 of the list, so that a token's sums do
// not depend on the run it came in.
//
// Bound by the tensor cores: 4 * 128 * 128 * D operations a tile for 4 * 128 * D bytes from the
// second-level cache, 128 operations a byte.
#pragma once

#include "ops/attention/cuda_prefill_copy.cuh"

namespace llaisys::ops::cuda {

// The rows of a lane: g and g + 8 of its warp's 16.
struct WgmmaRowsSeen {
    int begin[2], end[2];
    int64_t out_at[2]; // -1: no such row
};

// Turns a tile of scores into weights; max and sum go along, fade is what the sums before are worth.
__device__ __forceinline__ void weigh_tile(float (&s)[64], float (&max)[2], float (&sum)[2],
                                           float (&fade)[2], const WgmmaRowsSeen &rows, int first,
                                           bool is_whole, float scale) {
    const int lane = threadIdx.x % kWarp;
    if (!is_whole) {
#pragma unroll
        for (int i = 0; i < 64; ++i) {
            const int e = first + i / 4 * 8 + lane % 4 * 2 + (i & 1);
            const int r = i >> 1 & 1;
            if (e < rows.begin[r] || e >= rows.end[r]) {
                s[i] = -INFINITY;
            }
        }
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        float top = -INFINITY;
#pragma unroll
        for (int j = 0; j < 16; ++j) {
            top = fmaxf(top, fmaxf(s[4 * j + 2 * r], s[4 * j + 2 * r + 1]));
        }
        top = fmaxf(top, __shfl_xor_sync(kAll, top, 1));
        top = fmaxf(top, __shfl_xor_sync(kAll, top, 2));
        const float now = fmaxf(max[r], top * scale); // the scale is positive
        const float safe = now == -INFINITY ? 0.0f : now;
        fade[r] = exp2_fast(max[r] - safe);
        max[r] = now;
        float added = 0;
#pragma unroll
        for (int j = 0; j < 16; ++j) {
            float &low = s[4 * j + 2 * r];
            float &high = s[4 * j + 2 * r + 1];
            low = exp2_fast(fmaf(low, scale, -safe));
            high = exp2_fast(fmaf(high, scale, -safe));
            added += low + high;
        }
        sum[r] = sum[r] * fade[r] + added;
    }
}

// Puts the queries of a warpgroup into shared memory: tiles of 64 rows and 64 columns.
template <typename T, int D>
__device__ __forceinline__ void put_queries(const AttentionArgs &args, const WgmmaSpan &span,
                                            int kv_head, int row0, unsigned char *to) {
    constexpr int kChunks = D / 8;
    for (int c = threadIdx.x % kWgmmaGroup; c < 64 * kChunks; c += kWgmmaGroup) {
        const int own = c / kChunks;
        const int chunk = c % kChunks;
        const int row = row0 + own;
        uint4 value = make_uint4(0, 0, 0, 0);
        if (row < span.n_tokens * args.group) {
            const int token = span.token0 + row / args.group;
            const int head = kv_head * args.group + row % args.group;
            value = *reinterpret_cast<const uint4 *>(static_cast<const T *>(args.q) +
                                                     token * args.q_token + head * args.q_head +
                                                     chunk * 8);
        }
        *reinterpret_cast<uint4 *>(to + chunk / 8 * (64 * 128) + swizzled(own, chunk % 8)) = value;
    }
    show_to_products();
}

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
// Of the two computing warpgroups; a turn is given once for each time it is waited for.
__device__ __forceinline__ void await_turn(int group) {
    asm volatile("bar.sync %0, %1;" ::"r"(3 + group), "n"(2 * kWgmmaGroup) : "memory");
}
__device__ __forceinline__ void give_turn(int group) {
    asm volatile("bar.arrive %0, %1;" ::"r"(3 + group), "n"(2 * kWgmmaGroup) : "memory");
}

// One warpgroup: its 64 rows against all tiles.
template <typename T, int D>
__device__ __forceinline__ void attend_tiles(const AttentionArgs &args, const WgmmaSpan &span,
                                             const WgmmaRowsSeen &rows, uint32_t queries,
                                             uint32_t ring, uint32_t full, uint32_t empty,
                                             float (&out)[D / 2], float (&sum)[2]) {
    const int n = span.last_tile - span.first_tile;
    // Heads of 64 have half the products for as many weights: there the warpgroups take turns at the tensor
    // cores, so that one weighs while the other multiplies. Of 128, they find their own way as well.
    constexpr bool kTakesTurns = D == 64;
    const int group = threadIdx.x / kWgmmaGroup;
    if (kTakesTurns && group == 1 && n > 1) {
        give_turn(0);
    }
    float max[2] = {-INFINITY, -INFINITY};
    float fade[2];
    float s[64];
    uint32_t p[32];
    const auto tile_of = [&](int item) {
        return ring + uint32_t(item % kWgmmaSlots) * wgmma_tile_bytes<D>();
    };
    const auto wait = [&](int item) {
        barrier_wait(full + uint32_t(item % kWgmmaSlots) * 8, uint32_t(item / kWgmmaSlots) & 1);
    };
    const auto release = [&](int item) {
        if (threadIdx.x % kWarp == 0) {
            barrier_arrive(empty + uint32_t(item % kWgmmaSlots) * 8);
        }
    };
    const auto multiply_keys = [&](int item) {
        const uint32_t keys = tile_of(item);
#pragma unroll
        for (int step = 0; step < D / 16; ++step) {
            const uint32_t inside = uint32_t(step % 4) * 32;
            Wgmma<T>::along(s, descriptor_along(queries + uint32_t(step / 4) * (64 * 128) + inside),
                            descriptor_along(keys + uint32_t(step / 4) * kColumnBytes + inside),
                            step > 0);
        }
        products_end_group();
    };
    const auto add_values = [&](int item) {
        const uint32_t values = tile_of(item);
#pragma unroll
        for (int step = 0; step < kWgmmaKeys / 16; ++step) {
            Wgmma<T>::down(out, p + 4 * step,
                           descriptor_down(values + uint32_t(step) * 16 * 128, kColumnBytes));
        }
        products_end_group();
    };
    const auto weigh = [&](int i) {
        const int first = (span.first_tile + i) * kWgmmaKeys;
        const bool is_whole = first >= span.high_begin && first + kWgmmaKeys <= span.low_end;
        weigh_tile(s, max, sum, fade, rows, first, is_whole, args.scale_log2);
    };
    const auto pack = [&] {
#pragma unroll
        for (int i = 0; i < 32; ++i) {
            p[i] = pack_pair<T>(s[2 * i], s[2 * i + 1]);
        }
    };

    // The next values are waited for before those under way are: of a softmax that stands before this loop
    // nothing is put off until after products_wait<0>(). Nor is more waited for: a copying thread says that a
    // tile is there when it has begun two more, for which there must be room.
    const auto wait_for_values = [&](int i) {
        settle(s);
        wait(2 * i + 1);
    };

    wait(0);
    products_begin();
    multiply_keys(0);
    products_wait<0>();
    settle(s);
    release(0);
    weigh(0);
    wait_for_values(0);
    pack();
    for (int i = 1; i < n; ++i) {
        wait(2 * i);
        if (kTakesTurns) {
            await_turn(group);
        }
        products_begin();
        multiply_keys(2 * i);
        add_values(2 * i - 1);
        if (kTakesTurns && (group == 0 || i + 1 < n)) {
            give_turn(1 - group);
        }
        products_wait<1>();
        settle(s);
        release(2 * i);
        weigh(i);
        wait_for_values(i);
        products_wait<0>();
        settle(out);
        release(2 * i - 1);
#pragma unroll
        for (int j = 0; j < D / 2; ++j) {
            out[j] *= fade[j >> 1 & 1];
        }
        pack();
    }
    products_begin();
    add_values(2 * n - 1);
    products_wait<0>();
    settle(out);
}
#endif

template <typename T, int D>
__global__ void __launch_bounds__(kWgmmaThreads, 1)
    attention_wgmma_kernel(AttentionArgs args, const int32_t *runs,
                           const __grid_constant__ WgmmaPages pages) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    extern __shared__ __align__(1024) unsigned char dynamic[];
    __shared__ WgmmaSpan span_of_block;
    __shared__ __align__(8) uint64_t barriers[2 * kWgmmaSlots];
    const uint32_t to_1024 = (0u - shared_address(dynamic)) & 1023u;
    unsigned char *shared = dynamic + to_1024;

    const int first_token = runs[2 * blockIdx.z];
    const int run_tokens = runs[2 * blockIdx.z + 1];
    const int tile_tokens = kWgmmaRows / args.group;
    const int from_token = (int(gridDim.y) - 1 - int(blockIdx.y)) * tile_tokens;
    if (from_token >= run_tokens) {
        return;
    }
    const int kv_head = blockIdx.x;
    const int lane = threadIdx.x % kWarp;
    const int group = threadIdx.x / kWgmmaGroup; // of warps
    const uint32_t ring = shared_address(shared);
    const uint32_t full = shared_address(barriers);
    const uint32_t empty = full + kWgmmaSlots * 8;
    WgmmaSpan span{};
    span.token0 = first_token + from_token;
    span.n_tokens = min(tile_tokens, run_tokens - from_token);

    if (group == 2) {
        give_registers<56>();
        span.find_lists(args);
        if (threadIdx.x == 2 * kWgmmaGroup) {
            span_of_block = span;
            for (int i = 0; i < kWgmmaSlots; ++i) {
                barrier_init(full + i * 8, pages.n_slots > 0 ? 1 : kWgmmaGroup);
                barrier_init(empty + i * 8, 2 * kWgmmaGroup / kWarp);
            }
            barriers_are_made();
        }
        meet<1, kWgmmaGroup>();
        go_on<2, kWgmmaThreads>(); // without waiting for the queries
        if (pages.n_slots == 0) {
            copy_tiles<T, D>(args, span, kv_head, ring, full, empty);
        } else if (const int warp = int(threadIdx.x) / kWarp % 4; warp < 2) {
            copy_pages<T, D>(args, pages, span, kv_head, warp == 1, shared, full, empty);
        }
    } else {
        unsigned char *queries =
            shared + wgmma_tile_bytes<D>() * kWgmmaSlots + uint32_t(group) * (64 * D * 2);
        put_queries<T, D>(args, span, kv_head, group * 64, queries);
        WgmmaRowsSeen rows;
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const int row = threadIdx.x / kWarp * 16 + r * 8 + lane / 4;
            const int token = span.token0 + row / args.group;
            const int head = kv_head * args.group + row % args.group;
            const bool is_there = row < span.n_tokens * args.group;
            rows.begin[r] = is_there ? args.begin[token] : 0;
            rows.end[r] = is_there ? args.end[token] : 0;
            rows.out_at[r] = is_there ? token * args.out_token + head * args.out_head : -1;
        }
        meet<2, kWgmmaThreads>();
        take_registers<224>();
        span = span_of_block;
        float out[D / 2] = {};
        float sum[2] = {};
        if (span.last_tile > span.first_tile) {
            attend_tiles<T, D>(args, span, rows, shared_address(queries), ring, full, empty, out,
                               sum);
        }
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            float total = sum[r];
            total += __shfl_xor_sync(kAll, total, 1);
            total += __shfl_xor_sync(kAll, total, 2);
            const float factor = total > 0 ? 1.0f / total : 0.0f;
            if (rows.out_at[r] >= 0) {
                T *to = static_cast<T *>(args.out) + rows.out_at[r] + lane % 4 * 2;
#pragma unroll
                for (int j = 0; j < D / 8; ++j) {
                    *reinterpret_cast<uint32_t *>(to + j * 8) =
                        pack_pair<T>(out[4 * j + 2 * r] * factor, out[4 * j + 2 * r + 1] * factor);
                }
            }
        }
    }
#endif
}

} // namespace llaisys::ops::cuda
