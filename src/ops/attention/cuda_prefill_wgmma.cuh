// Prefill attention with wgmma on compute capability 9.0 (as FlashAttention-3): work tiles of 128
// rows (token, head of the group) against KV tiles of 128 keys.
//
// Persistent blocks (cuda_prefill_scheduler.cuh). Two consumer warpgroups compute 64 rows each; a
// producer warpgroup (cuda_prefill_producer.cuh) loads the queries of this and the next work
// tile, and keys and values into a pipeline of 5 tiles (keys, values, keys, ...). Scores,
// probabilities and output of a warpgroup stay in registers. QK^T of a tile overlaps with PV of
// the previous tile and with the softmax, also across work tiles; the warpgroups alternate on the
// tensor cores (ping-pong), so that one computes softmax while the other multiplies. Tiles count
// from position 0 of the sequence, so that the result of a token does not depend on its run.
//
// Bound: tensor cores; 4 * 128 * 128 * D FLOP per tile for 4 * 128 * D bytes from L2, 128 FLOP
// per byte.
#pragma once

#include "ops/attention/cuda_prefill_producer.cuh"

namespace llaisys::ops::cuda {

// The rows of a lane: g and g + 8 of its warp's 16.
struct RowBounds {
    int begin[2], end[2];
    int64_t out_at[2]; // -1: no such row
};

// Turns a tile of scores into probabilities (online softmax): updates max and sum; rescale is the
// factor for previous sums.
__device__ __forceinline__ void softmax_tile(float (&s)[64], float (&max)[2], float (&sum)[2],
                                             float (&rescale)[2], const RowBounds &rows, int first,
                                             bool is_whole, float scale, float cap_scale) {
    const int lane = threadIdx.x % kWarpSize;
    if (cap_scale != 0) {
#pragma unroll
        for (int i = 0; i < 64; ++i) {
            s[i] = soft_capped(s[i], cap_scale);
        }
    }
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
        top = fmaxf(top, __shfl_xor_sync(kFullMask, top, 1));
        top = fmaxf(top, __shfl_xor_sync(kFullMask, top, 2));
        const float now = fmaxf(max[r], top * scale); // scale is positive
        const float safe = now == -INFINITY ? 0.0f : now;
        rescale[r] = ex2_approx_ftz(max[r] - safe);
        max[r] = now;
        float added = 0;
#pragma unroll
        for (int j = 0; j < 16; ++j) {
            float &low = s[4 * j + 2 * r];
            float &high = s[4 * j + 2 * r + 1];
            low = ex2_approx_ftz(fmaf(low, scale, -safe));
            high = ex2_approx_ftz(fmaf(high, scale, -safe));
            added += low + high;
        }
        sum[r] = sum[r] * rescale[r] + added;
    }
}

// Shared memory between producer and consumers.
struct WgmmaShared {
    WorkTile work_tiles[kQueryStages][2];             // by query stage and consumer warpgroup
    uint64_t full[kWgmmaStages], empty[kWgmmaStages]; // of the KV pipeline

    __device__ __forceinline__ void init_barriers(bool uses_tma) {
        for (int i = 0; i < kWgmmaStages; ++i) {
            mbarrier_init(smem_address(&full[i]), uses_tma ? 1 : kWgmmaGroup);
            mbarrier_init(smem_address(&empty[i]), 2 * kWgmmaGroup / kWarpSize);
        }
        fence_mbarrier_init();
    }
};

// Named barrier between a producer warp and a consumer warpgroup: one side arrives, the other
// syncs. Used for query stages that are full or empty. Arrivals and syncs alternate.
struct NamedBarrier {
    int number; // barrier id
    __device__ __forceinline__ void sync() const {
        asm volatile("bar.sync %0, %1;" ::"r"(number), "n"(kWgmmaGroup + kWarpSize) : "memory");
    }
    __device__ __forceinline__ void arrive() const {
        asm volatile("bar.arrive %0, %1;" ::"r"(number), "n"(kWgmmaGroup + kWarpSize) : "memory");
    }
};
__device__ __forceinline__ NamedBarrier query_full(int query_index, int group) {
    return {1 + query_index % kQueryStages * 2 + group};
}
__device__ __forceinline__ NamedBarrier query_empty(int query_index, int group) {
    return {1 + 2 * kQueryStages + query_index % kQueryStages * 2 + group};
}

// Warp scheduler barriers of the two consumer warpgroups: one arrive per sync.
constexpr int kSchedulerBarrier = 1 + 4 * kQueryStages;
__device__ __forceinline__ void warp_scheduler_barrier_sync(int group) {
    asm volatile("bar.sync %0, %1;" ::"r"(kSchedulerBarrier + group), "n"(2 * kWgmmaGroup)
                 : "memory");
}
__device__ __forceinline__ void warp_scheduler_barrier_arrive(int group) {
    asm volatile("bar.arrive %0, %1;" ::"r"(kSchedulerBarrier + group), "n"(2 * kWgmmaGroup)
                 : "memory");
}

// Broadcasts lane 0, so that the compiler keeps derived values in uniform registers.
__device__ __forceinline__ int warp_uniform(int value) { return __shfl_sync(kFullMask, value, 0); }

// One consumer warpgroup: its 64 rows of every work tile against all KV tiles.
template <typename T, int D>
__device__ __forceinline__ void consume_tiles(const AttentionArgs &args, WgmmaShared &shared,
                                              uint32_t buffer, uint32_t queries) {
    const int group = warp_uniform(int(threadIdx.x) / kWgmmaGroup);
    const int lane = threadIdx.x % kWarpSize;
    const uint32_t full = smem_address(shared.full);
    const uint32_t empty = smem_address(shared.empty);
    WorkTile work;
    RowBounds rows;
    int query_index = 0; // work tiles done
    int at = 0;          // pipeline index of the next keys
    float out[D / 2] = {};
    float sum[2] = {};
    float max[2] = {-INFINITY, -INFINITY};
    float rescale[2];
    float s[64];
    uint32_t p[32];

    const auto wait_queries = [&] { // false: no more work
        query_full(query_index, group).sync();
        return warp_uniform(shared.work_tiles[query_index % kQueryStages][group].n_tokens) > 0;
    };
    const auto read_work_tile = [&] {
        work = shared.work_tiles[query_index % kQueryStages][group];
        work.first_tile = warp_uniform(work.first_tile);
        work.last_tile = warp_uniform(work.last_tile);
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const int row = threadIdx.x / kWarpSize * 16 + r * 8 + lane / 4;
            const int token = work.token0 + row / args.group;
            const int head = work.kv_head * args.group + row % args.group;
            const bool is_there = row < work.n_tokens * args.group;
            rows.begin[r] = is_there ? args.begin[token] : 0;
            rows.end[r] = is_there ? args.end[token] : 0;
            rows.out_at[r] = is_there ? token * args.out_token + head * args.out_head : -1;
        }
    };
    const auto tile_of = [&](int item) {
        return buffer + uint32_t(item % kWgmmaStages) * wgmma_tile_bytes<D>();
    };
    const auto wait = [&](int item) {
        mbarrier_wait_parity(full + uint32_t(item % kWgmmaStages) * 8,
                             uint32_t(item / kWgmmaStages) & 1);
    };
    const auto release = [&](int item) {
        if (lane == 0) {
            mbarrier_arrive(empty + uint32_t(item % kWgmmaStages) * 8);
        }
    };
    const auto issue_qk = [&] {
        const uint32_t own =
            queries + uint32_t(query_index % kQueryStages * 2 + group) * wgmma_query_bytes<D>();
        const uint32_t keys = tile_of(at);
#pragma unroll
        for (int step = 0; step < D / 16; ++step) {
            const uint32_t inside = uint32_t(step % 4) * 32;
            Wgmma<T>::k_major(s, k_major_descriptor(own + uint32_t(step / 4) * (64 * 128) + inside),
                              k_major_descriptor(keys + uint32_t(step / 4) * kColumnBytes + inside),
                              step > 0);
        }
        wgmma_commit_group();
    };
    const auto issue_pv = [&] { // values of the previous tile
        const uint32_t values = tile_of(at - 1);
#pragma unroll
        for (int step = 0; step < kWgmmaKeys / 16; ++step) {
            Wgmma<T>::mn_major(
                out, p + 4 * step,
                mn_major_descriptor(values + uint32_t(step) * 16 * 128, kColumnBytes), 1);
        }
        wgmma_commit_group();
    };
    const auto softmax = [&](int tile) {
        const int first = tile * kWgmmaKeys;
        const bool is_whole = first >= work.high_begin && first + kWgmmaKeys <= work.low_end;
        softmax_tile(s, max, sum, rescale, rows, first, is_whole, args.scale_log2, args.cap_scale);
    };
    const auto add_sinks = [&] { // to the sum of one of the four lanes of a row
        for (int r = 0; args.sinks != nullptr && lane % 4 == 0 && r < 2; ++r) {
            const int row = threadIdx.x / kWarpSize * 16 + r * 8 + lane / 4;
            sum[r] = args.with_sink(work.kv_head * args.group + row % args.group, max[r], sum[r]);
        }
    };
    const auto pack = [&] {
#pragma unroll
        for (int i = 0; i < 32; ++i) {
            p[i] = pack_pair<T>(s[2 * i], s[2 * i + 1]);
        }
    };
    const auto write = [&](const float *total, const int64_t *out_at) { // two rows per lane
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            float whole = total[r];
            whole += __shfl_xor_sync(kFullMask, whole, 1);
            whole += __shfl_xor_sync(kFullMask, whole, 2);
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
    // Waits for the next values before the wgmma in flight: this keeps the preceding softmax
    // ahead of wgmma_wait_group<0>(). It must not wait for more: a producer thread publishes a
    // tile after it has issued two more, which need free stages.
    const auto wait_for_values = [&] {
        fence_operands(s);
        wait(at + 1);
    };

    if (!wait_queries()) {
        return;
    }
    read_work_tile();
    if (group == 1) {
        warp_scheduler_barrier_arrive(0);
    }
    wait(at);
    wgmma_fence();
    issue_qk();
    wgmma_wait_group<0>();
    fence_operands(s);
    release(at);
    softmax(work.first_tile);
    wait_for_values();
    pack();
    int tile = work.first_tile + 1;
    while (true) {
        at += 2;
        const bool begins = tile == work.last_tile; // first tile of the next work tile
        float total[2];
        int64_t out_at[2];
        if (begins) {
            ++query_index;
            if (!wait_queries()) {
                break;
            }
            query_empty(query_index - 1, group).arrive();
            add_sinks();
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                total[r] = sum[r];
                out_at[r] = rows.out_at[r];
                sum[r] = 0;
                max[r] = -INFINITY;
            }
            read_work_tile();
            tile = work.first_tile;
        }
        wait(at);
        warp_scheduler_barrier_sync(group);
        wgmma_fence();
        issue_qk();
        issue_pv();
        warp_scheduler_barrier_arrive(1 - group);
        wgmma_wait_group<1>();
        fence_operands(s);
        release(at);
        softmax(tile++);
        wait_for_values();
        wgmma_wait_group<0>();
        fence_operands(out);
        release(at - 1);
        if (begins) {
            write(total, out_at);
#pragma unroll
            for (int j = 0; j < D / 2; ++j) {
                out[j] = 0;
            }
            fence_operands(out);
        } else {
#pragma unroll
            for (int j = 0; j < D / 2; ++j) {
                out[j] *= rescale[j >> 1 & 1];
            }
        }
        pack();
    }
    wgmma_fence();
    issue_pv();
    wgmma_wait_group<0>();
    fence_operands(out);
    add_sinks();
    write(sum, rows.out_at);
    if (group == 0) { // the arrive that has no matching sync yet
        warp_scheduler_barrier_sync(0);
    }
}

template <typename T, int D>
__global__ void __launch_bounds__(kWgmmaThreads, 1)
    attention_wgmma_kernel(AttentionArgs args, TileScheduler scheduler,
                           const __grid_constant__ PagedKvMaps kv_maps) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    extern __shared__ __align__(1024) unsigned char dynamic[];
    __shared__ __align__(8) WgmmaShared shared;
    const uint32_t to_1024 = (0u - smem_address(dynamic)) & 1023u;
    unsigned char *buffer = dynamic + to_1024;
    const uint32_t queries = smem_address(buffer) + wgmma_tile_bytes<D>() * kWgmmaStages;
    const bool uses_tma = kv_maps.n_slots > 0;
    if (threadIdx.x == 0) {
        shared.init_barriers(uses_tma);
    }
    __syncthreads();
    grid_dependency_wait();
    if (threadIdx.x < 2 * kWgmmaGroup) {
        setmaxnreg_inc<224>();
        consume_tiles<T, D>(args, shared, smem_address(buffer), queries);
        return;
    }
    setmaxnreg_dec<56>();
    const int warp = int(threadIdx.x) / kWarpSize % 4;
    const uint32_t full = smem_address(shared.full);
    const uint32_t empty = smem_address(shared.empty);
    WorkTile work{};
    // for warpgroup warp - 2; also signals the end of the work
    const auto produce_queries = [&](int query_index) {
        const int stage = query_index % kQueryStages;
        const int group = warp - 2;
        if (query_index >= kQueryStages) {
            query_empty(query_index, group).sync();
        }
        if (work.n_tokens > 0) {
            load_queries<T, D>(args, work, group * 64,
                               queries + uint32_t(stage * 2 + group) * wgmma_query_bytes<D>());
        }
        if (threadIdx.x % kWarpSize == 0) {
            shared.work_tiles[stage][group] = work;
        }
        query_full(query_index, group).arrive();
    };
    if (uses_tma && warp < 2) {
        for (int round = 0, at = 0; work.take(args, scheduler, &round); at += work.kv_tiles()) {
            load_kv_tma<T, D>(args, kv_maps, work, at, warp == 1, buffer, full, empty);
        }
    } else if (uses_tma) {
        int query_index = 0;
        for (int round = 0; work.take(args, scheduler, &round); ++query_index) {
            produce_queries(query_index);
        }
        produce_queries(query_index);
    } else {
        int query_index = 0;
        for (int round = 0, at = 0; work.take(args, scheduler, &round); at += work.kv_tiles()) {
            if (warp >= 2) {
                produce_queries(query_index++);
            }
            load_kv_cp_async<T, D>(args, work, at, smem_address(buffer), full, empty);
        }
        if (warp >= 2) {
            produce_queries(query_index);
        }
    }
#endif
}

} // namespace llaisys::ops::cuda
