// Runs of neighbouring query tokens of one list on compute capability 9.0: items of 128 rows (token, head of the
// group) against tiles of 128 keys, on wgmma.
//
// A block takes one item after the other (cuda_prefill_items.cuh). Two warpgroups compute, 64 rows each; a third
// copies (cuda_prefill_copy.cuh): queries of this item and of the next, keys and values into a ring of 5 tiles
// that alternate: keys, values, keys, .. Scores, weights and the output of a warpgroup stay in registers. The
// scores of a tile are under way while the values of the one before are added, and the softmax runs beside that,
// also where the one before belongs to another item; the warpgroups take turns at the tensor cores, so that one
// weighs while the other multiplies. Tiles count from entry 0 of the list, so that a token's
// sums do not depend on the run it came in.
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

// What the warps of a block tell each other.
struct WgmmaShared {
    WgmmaSpan spans[kQuestions]
                   [2]; // of the queries that are there, one for each computing warpgroup
    uint64_t full[kWgmmaSlots], empty[kWgmmaSlots]; // of the ring

    __device__ __forceinline__ void make_barriers(bool are_pages) {
        for (int i = 0; i < kWgmmaSlots; ++i) {
            barrier_init(shared_address(&full[i]), are_pages ? 1 : kWgmmaGroup);
            barrier_init(shared_address(&empty[i]), 2 * kWgmmaGroup / kWarp);
        }
        barriers_are_made();
    }
};

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
// A meeting of the warp that asks and the warpgroup that answers, at which one of them need not wait: queries
// have come, or are not needed any more. Each is left as often as it is waited for.
struct WgmmaMeeting {
    int number; // of the block's meetings
    __device__ __forceinline__ void wait() const {
        asm volatile("bar.sync %0, %1;" ::"r"(number), "n"(kWgmmaGroup + kWarp) : "memory");
    }
    __device__ __forceinline__ void leave() const {
        asm volatile("bar.arrive %0, %1;" ::"r"(number), "n"(kWgmmaGroup + kWarp) : "memory");
    }
};
__device__ __forceinline__ WgmmaMeeting asked(int question, int group) {
    return {1 + question % kQuestions * 2 + group};
}
__device__ __forceinline__ WgmmaMeeting answered(int question, int group) {
    return {1 + 2 * kQuestions + question % kQuestions * 2 + group};
}

// Of the two computing warpgroups; a turn is given once for each time it is waited for.
constexpr int kTurns = 1 + 4 * kQuestions;
__device__ __forceinline__ void await_turn(int group) {
    asm volatile("bar.sync %0, %1;" ::"r"(kTurns + group), "n"(2 * kWgmmaGroup) : "memory");
}
__device__ __forceinline__ void give_turn(int group) {
    asm volatile("bar.arrive %0, %1;" ::"r"(kTurns + group), "n"(2 * kWgmmaGroup) : "memory");
}

// A value that all lanes have, said to the compiler: what follows from it costs no registers of a lane.
__device__ __forceinline__ int same_in_warp(int value) { return __shfl_sync(kAll, value, 0); }

// One warpgroup: its 64 rows of every item against all tiles.
template <typename T, int D>
__device__ __forceinline__ void attend_items(const AttentionArgs &args, WgmmaShared &shared,
                                             uint32_t ring, uint32_t queries) {
    const int group = same_in_warp(int(threadIdx.x) / kWgmmaGroup);
    const int lane = threadIdx.x % kWarp;
    const uint32_t full = shared_address(shared.full);
    const uint32_t empty = shared_address(shared.empty);
    WgmmaSpan span;
    WgmmaRowsSeen rows;
    int question = 0; // items before this one
    int at = 0;       // of the ring: the next keys
    float out[D / 2] = {};
    float sum[2] = {};
    float max[2] = {-INFINITY, -INFINITY};
    float fade[2];
    float s[64];
    uint32_t p[32];

    const auto is_asked = [&] { // false: there is nothing left
        asked(question, group).wait();
        return same_in_warp(shared.spans[question % kQuestions][group].n_tokens) > 0;
    };
    const auto read_question = [&] {
        span = shared.spans[question % kQuestions][group];
        span.first_tile = same_in_warp(span.first_tile);
        span.last_tile = same_in_warp(span.last_tile);
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const int row = threadIdx.x / kWarp * 16 + r * 8 + lane / 4;
            const int token = span.token0 + row / args.group;
            const int head = span.kv_head * args.group + row % args.group;
            const bool is_there = row < span.n_tokens * args.group;
            rows.begin[r] = is_there ? args.begin[token] : 0;
            rows.end[r] = is_there ? args.end[token] : 0;
            rows.out_at[r] = is_there ? token * args.out_token + head * args.out_head : -1;
        }
    };
    const auto tile_of = [&](int item) {
        return ring + uint32_t(item % kWgmmaSlots) * wgmma_tile_bytes<D>();
    };
    const auto wait = [&](int item) {
        barrier_wait(full + uint32_t(item % kWgmmaSlots) * 8, uint32_t(item / kWgmmaSlots) & 1);
    };
    const auto release = [&](int item) {
        if (lane == 0) {
            barrier_arrive(empty + uint32_t(item % kWgmmaSlots) * 8);
        }
    };
    const auto multiply_keys = [&] {
        const uint32_t own =
            queries + uint32_t(question % kQuestions * 2 + group) * wgmma_query_bytes<D>();
        const uint32_t keys = tile_of(at);
#pragma unroll
        for (int step = 0; step < D / 16; ++step) {
            const uint32_t inside = uint32_t(step % 4) * 32;
            Wgmma<T>::along(s, descriptor_along(own + uint32_t(step / 4) * (64 * 128) + inside),
                            descriptor_along(keys + uint32_t(step / 4) * kColumnBytes + inside),
                            step > 0);
        }
        products_end_group();
    };
    const auto add_values = [&] { // of the tile before
        const uint32_t values = tile_of(at - 1);
#pragma unroll
        for (int step = 0; step < kWgmmaKeys / 16; ++step) {
            Wgmma<T>::down(out, p + 4 * step,
                           descriptor_down(values + uint32_t(step) * 16 * 128, kColumnBytes));
        }
        products_end_group();
    };
    const auto weigh = [&](int tile) {
        const int first = tile * kWgmmaKeys;
        const bool is_whole = first >= span.high_begin && first + kWgmmaKeys <= span.low_end;
        weigh_tile(s, max, sum, fade, rows, first, is_whole, args.scale_log2);
    };
    const auto pack = [&] {
#pragma unroll
        for (int i = 0; i < 32; ++i) {
            p[i] = pack_pair<T>(s[2 * i], s[2 * i + 1]);
        }
    };
    const auto write = [&](const float *total, const int64_t *out_at) { // of two rows
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            float whole = total[r];
            whole += __shfl_xor_sync(kAll, whole, 1);
            whole += __shfl_xor_sync(kAll, whole, 2);
            const float factor = whole > 0 ? 1.0f / whole : 0.0f;
            if (out_at[r] >= 0) {
                T *to = static_cast<T *>(args.out) + out_at[r] + lane % 4 * 2;
#pragma unroll
                for (int j = 0; j < D / 8; ++j) {
                    *reinterpret_cast<uint32_t *>(to + j * 8) =
                        pack_pair<T>(out[4 * j + 2 * r] * factor, out[4 * j + 2 * r + 1] * factor);
                }
            }
        }
    };
    // The next values are waited for before those under way are: of a softmax that stands before this loop
    // nothing is put off until after products_wait<0>(). Nor is more waited for: a copying thread says that a
    // tile is there when it has begun two more, for which there must be room.
    const auto wait_for_values = [&] {
        settle(s);
        wait(at + 1);
    };

    if (!is_asked()) {
        return;
    }
    read_question();
    if (group == 1) {
        give_turn(0);
    }
    wait(at);
    products_begin();
    multiply_keys();
    products_wait<0>();
    settle(s);
    release(at);
    weigh(span.first_tile);
    wait_for_values();
    pack();
    int tile = span.first_tile + 1;
    while (true) {
        at += 2;
        const bool begins = tile == span.last_tile; // another item
        float total[2];
        int64_t out_at[2];
        if (begins) {
            ++question;
            if (!is_asked()) {
                break;
            }
            answered(question - 1, group).leave();
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                total[r] = sum[r];
                out_at[r] = rows.out_at[r];
                sum[r] = 0;
                max[r] = -INFINITY;
            }
            read_question();
            tile = span.first_tile;
        }
        wait(at);
        await_turn(group);
        products_begin();
        multiply_keys();
        add_values();
        give_turn(1 - group);
        products_wait<1>();
        settle(s);
        release(at);
        weigh(tile++);
        wait_for_values();
        products_wait<0>();
        settle(out);
        release(at - 1);
        if (begins) {
            write(total, out_at);
#pragma unroll
            for (int j = 0; j < D / 2; ++j) {
                out[j] = 0;
            }
            settle(out);
        } else {
#pragma unroll
            for (int j = 0; j < D / 2; ++j) {
                out[j] *= fade[j >> 1 & 1];
            }
        }
        pack();
    }
    products_begin();
    add_values();
    products_wait<0>();
    settle(out);
    write(sum, rows.out_at);
    if (group == 0) { // the one that was given and not asked for
        await_turn(0);
    }
}
#endif

template <typename T, int D>
__global__ void __launch_bounds__(kWgmmaThreads, 1)
    attention_wgmma_kernel(AttentionArgs args, WgmmaItems items,
                           const __grid_constant__ WgmmaPages pages) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    extern __shared__ __align__(1024) unsigned char dynamic[];
    __shared__ __align__(8) WgmmaShared shared;
    const uint32_t to_1024 = (0u - shared_address(dynamic)) & 1023u;
    unsigned char *ring = dynamic + to_1024;
    const uint32_t queries = shared_address(ring) + wgmma_tile_bytes<D>() * kWgmmaSlots;
    const bool are_pages = pages.n_slots > 0;
    if (threadIdx.x == 0) {
        shared.make_barriers(are_pages);
    }
    __syncthreads();
    wait_for_input();
    if (threadIdx.x < 2 * kWgmmaGroup) {
        take_registers<224>();
        attend_items<T, D>(args, shared, shared_address(ring), queries);
        return;
    }
    give_registers<56>();
    const int warp = int(threadIdx.x) / kWarp % 4;
    const uint32_t full = shared_address(shared.full);
    const uint32_t empty = shared_address(shared.empty);
    WgmmaSpan span{};
    const auto ask = [&](int question) { // the warpgroup warp - 2, also when there is nothing left
        const int place = question % kQuestions;
        const int group = warp - 2;
        if (question >= kQuestions) {
            answered(question, group).wait();
        }
        if (span.n_tokens > 0) {
            copy_queries<T, D>(args, span, group * 64,
                               queries + uint32_t(place * 2 + group) * wgmma_query_bytes<D>());
        }
        if (threadIdx.x % kWarp == 0) {
            shared.spans[place][group] = span;
        }
        asked(question, group).leave();
    };
    if (are_pages && warp < 2) {
        for (int round = 0, at = 0; span.take(args, items, &round); at += span.ring_items()) {
            copy_pages<T, D>(args, pages, span, at, warp == 1, ring, full, empty);
        }
    } else if (are_pages) {
        int question = 0;
        for (int round = 0; span.take(args, items, &round); ++question) {
            ask(question);
        }
        ask(question);
    } else {
        int question = 0;
        for (int round = 0, at = 0; span.take(args, items, &round); at += span.ring_items()) {
            if (warp >= 2) {
                ask(question++);
            }
            copy_tiles<T, D>(args, span, at, shared_address(ring), full, empty);
        }
        if (warp >= 2) {
            ask(question);
        }
    }
#endif
}

} // namespace llaisys::ops::cuda
