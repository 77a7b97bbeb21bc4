// Producer warps of cuda_prefill_wgmma.cuh: queries of successive work tiles into two stages,
// keys and values through the block table into a pipeline of KV tiles.
//
// With KV blocks of a multiple of 16 slots, two warps issue TMA loads of 16 slots by 64 columns.
// Otherwise a warpgroup copies row by row (cp.async, 16 bytes per lane); this is slower because
// the proxy fence of each tile waits for all copies in flight.
#pragma once

#include "ops/attention/cuda_prefill_scheduler.cuh"
#include "ops/cuda/mbarrier.cuh"
#include "ops/cuda/tma.cuh"
#include "ops/cuda/wgmma.cuh"

namespace llaisys::ops::cuda {

constexpr int kWgmmaThreads = 3 * kWgmmaGroup;
constexpr int kWgmmaStages = 5;                     // KV tiles in the pipeline
constexpr int kWgmmaLag = 2;                        // tiles in flight per producer thread
constexpr uint32_t kColumnBytes = kWgmmaKeys * 128; // 64 columns of a tile of keys or values

template <int D> __host__ __device__ constexpr uint32_t wgmma_tile_bytes() {
    return kWgmmaKeys * D * 2;
}
// Of one warpgroup.
template <int D> __host__ __device__ constexpr uint32_t wgmma_query_bytes() { return 64 * D * 2; }
template <int D> constexpr int wgmma_shared_bytes() {
    return 1024 + int(wgmma_tile_bytes<D>()) * kWgmmaStages +
           kQueryStages * 2 * int(wgmma_query_bytes<D>());
}

constexpr int kTmaPage = 16; // slots per TMA tile

// Tensor maps of keys and values [slots, kv_heads, D]; a TMA tile is 16 slots of one head by 64
// columns.
struct PagedKvMaps {
    CUtensorMap k, v;
    int32_t n_slots; // 0: TMA is not usable
};

// Loads the queries of a warpgroup, tiles of 64 rows and 64 columns, and waits for them; one
// warp.
template <typename T, int D>
__device__ __forceinline__ void load_queries(const AttentionArgs &args, const WorkTile &work,
                                             int row0, uint32_t to) {
    constexpr int kChunks = D / 8;
    const int lane = threadIdx.x % kWarpSize;
    const int chunk = lane % kChunks;
    const int head0 = work.kv_head * args.group;
    const T *from = static_cast<const T *>(args.q) + chunk * 8;
#pragma unroll 4
    for (int own = lane / kChunks; own < 64; own += kWarpSize / kChunks) {
        const int row = row0 + own;
        const bool is_there = row < work.n_tokens * args.group;
        const int token = is_there ? work.token0 + row / args.group : work.token0;
        const int head = is_there ? head0 + row % args.group : head0;
        cp_async_16(to + uint32_t(chunk / 8) * (64 * 128) + swizzle_128b(own, chunk % 8),
                    from + token * args.q_token + head * args.q_head, is_there);
    }
    cp_async_commit_group();
    cp_async_wait_group<0>();
    fence_proxy_async();
    __syncwarp();
}

// Loads the KV tiles of a work tile with cp.async, from pipeline index `at` on; one warpgroup.
template <typename T, int D>
__device__ __forceinline__ void load_kv_cp_async(const AttentionArgs &args, const WorkTile &work,
                                                 int at, uint32_t buffer, uint32_t full,
                                                 uint32_t empty) {
    constexpr int kChunks = D / 8; // 16-byte chunks per row
    constexpr int kRowsPerPass = kWarpSize / kChunks;
    const int lane = threadIdx.x % kWarpSize;
    const int key0 = threadIdx.x / kWarpSize % 4 * kWarpSize; // first key of this warp in a tile
    const int chunk = lane % kChunks;
    const int32_t *table = args.table_of(work.token0);
    const auto slot_at = [&](int tile) { // KV slot of key key0 + lane; -1: masked
        const int e = tile * kWgmmaKeys + key0 + lane;
        return tile < work.last_tile && e >= work.low_begin && e < work.high_end
                   ? int(args.slot_of(table, e))
                   : -1;
    };
    const int end = at + 2 * (work.last_tile - work.first_tile);
    int next = slot_at(work.first_tile);
    int slot_of_key = -1;
    for (int i = 0; at < end + kWgmmaLag; ++i, ++at) {
        if (at < end) {
            if (i % 2 == 0) {
                slot_of_key = next;
                next = slot_at(work.first_tile + i / 2 + 1);
            }
            const uint32_t stage = uint32_t(at % kWgmmaStages);
            if (at >= kWgmmaStages) {
                mbarrier_wait_parity(empty + stage * 8, uint32_t(at / kWgmmaStages - 1) & 1);
            }
            const T *from = static_cast<const T *>(i % 2 == 0 ? args.k : args.v) +
                            int64_t(work.kv_head) * D + chunk * 8;
            const uint32_t to =
                buffer + stage * wgmma_tile_bytes<D>() + uint32_t(chunk / 8) * kColumnBytes;
#pragma unroll 4
            for (int first = 0; first < kWarpSize; first += kRowsPerPass) {
                const int row = first + lane / kChunks;
                const int slot = __shfl_sync(kFullMask, slot_of_key, row);
                cp_async_16(to + swizzle_128b(key0 + row, chunk % 8),
                            from + int64_t(slot < 0 ? 0 : slot) * args.kv_heads * D, slot >= 0);
            }
        }
        cp_async_commit_group(); // empty at the end
        if (i >= kWgmmaLag) {
            cp_async_wait_group<kWgmmaLag>();
            fence_proxy_async();
            mbarrier_arrive(full + uint32_t((at - kWgmmaLag) % kWgmmaStages) * 8);
        }
    }
}

// Loads the KV tiles with TMA: one warp for the keys, one for the values, 16 slots and 64 columns
// per lane. Masked pages are zero-filled. In the last page the values beyond the end are zeroed
// too: their weights are 0, but the memory may hold NaN. Scores of keys beyond the end are
// masked.
template <typename T, int D>
__device__ __forceinline__ void load_kv_tma(const AttentionArgs &args, const PagedKvMaps &kv_maps,
                                            const WorkTile &work, int at, bool are_values,
                                            unsigned char *buffer, uint32_t full, uint32_t empty) {
    constexpr int kPages = kWgmmaKeys / kTmaPage; // per tile
    constexpr uint32_t kPageBytes = kTmaPage * 128;
    const int lane = threadIdx.x % kWarpSize;
    const int page = lane % kPages;
    const int column = lane / kPages; // in units of 64
    const bool copies = column < D / 64;
    const int32_t *table = args.table_of(work.token0);
    const auto slot_at = [&](int tile) { // first KV slot of this lane's page
        const int e = tile * kWgmmaKeys + page * kTmaPage;
        return tile < work.last_tile && e + kTmaPage > work.low_begin && e < work.high_end
                   ? int(args.slot_of(table, e))
                   : kv_maps.n_slots;
    };
    const int valid = work.high_end % kTmaPage; // valid slots of the last page; 0: all
    const int partial_page = (work.high_end - 1) % kWgmmaKeys / kTmaPage;
    int next = slot_at(work.first_tile);
    at += are_values ? 1 : 0;
    for (int tile = work.first_tile; tile < work.last_tile; ++tile, at += 2) {
        const int slot = next;
        next = slot_at(tile + 1);
        const uint32_t stage = uint32_t(at % kWgmmaStages);
        if (at >= kWgmmaStages) {
            mbarrier_wait_parity(empty + stage * 8, uint32_t(at / kWgmmaStages - 1) & 1);
        }
        unsigned char *to = buffer + stage * wgmma_tile_bytes<D>();
        const bool is_partial = are_values && valid > 0 && tile == work.last_tile - 1;
        if (is_partial) { // copied with plain stores
            const int from = __shfl_sync(kFullMask, slot, partial_page);
#pragma unroll 2
            for (int c = lane; c < kTmaPage * (D / 8); c += kWarpSize) {
                const int row = c / (D / 8);
                const int chunk = c % (D / 8);
                uint4 value = make_uint4(0, 0, 0, 0);
                if (row < valid) {
                    value = *reinterpret_cast<const uint4 *>(
                        static_cast<const T *>(args.v) +
                        (int64_t(from + row) * args.kv_heads + work.kv_head) * D + chunk * 8);
                }
                *reinterpret_cast<uint4 *>(to + uint32_t(chunk / 8) * kColumnBytes +
                                           swizzle_128b(partial_page * kTmaPage + row, chunk % 8)) =
                    value;
            }
            fence_proxy_async();
            __syncwarp();
        }
        const uint32_t barrier = full + stage * 8;
        if (lane == 0) {
            mbarrier_arrive_expect_tx(barrier, wgmma_tile_bytes<D>() -
                                                   (is_partial ? D / 64 * kPageBytes : 0));
        }
        __syncwarp();
        if (copies && !(is_partial && page == partial_page)) {
            tma_load(smem_address(to) + uint32_t(column) * kColumnBytes +
                         uint32_t(page) * kPageBytes,
                     are_values ? &kv_maps.v : &kv_maps.k, column * kTmaTileK, work.kv_head, slot,
                     barrier);
        }
    }
}

// Tensor maps of a cache of n_slots; empty when blocks are not a multiple of 16 slots.
template <typename T, int D> PagedKvMaps paged_kv_maps(const AttentionArgs &args, int64_t n_slots) {
    PagedKvMaps kv_maps{};
    if (args.block_size % kTmaPage != 0 || encode_tensor_map() == nullptr ||
        n_slots > INT32_MAX - kTmaPage) {
        return kv_maps;
    }
    const auto map_of = [&](const void *data) {
        return make_tensor_map<T, 3>(static_cast<const T *>(data), {D, args.kv_heads, n_slots},
                                     {D, int64_t(args.kv_heads) * D}, {1, kTmaPage});
    };
    kv_maps.k = map_of(args.k);
    kv_maps.v = map_of(args.v);
    kv_maps.n_slots = int32_t(n_slots);
    return kv_maps;
}

} // namespace llaisys::ops::cuda
