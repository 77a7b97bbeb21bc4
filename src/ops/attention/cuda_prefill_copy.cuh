// What the copying warps of cuda_prefill_wgmma.cuh do: queries of one item after the other into two places,
// keys and values through the block table into a ring of tiles.
//
// Where 16 entries lie together (blocks of 16, 32, ..), two warps copy boxes of 16 entries and 64 columns.
// Otherwise a warpgroup copies row by row (cp.async, 16 bytes a lane): slower, since the fence that each tile
// needs waits for all copies that are under way.
#pragma once

#include "ops/attention/cuda_prefill_items.cuh"
#include "ops/cuda/bulk.cuh"
#include "ops/cuda/tensor_map.cuh"
#include "ops/cuda/wgmma.cuh"

namespace llaisys::ops::cuda {

constexpr int kWgmmaThreads = 3 * kWgmmaGroup;
constexpr int kWgmmaSlots = 5; // tiles in the ring
constexpr int kWgmmaLag = 2;   // tiles of which a copying thread waits for the oldest
constexpr uint32_t kColumnBytes = kWgmmaKeys * 128; // of 64 columns of a tile of keys or values

template <int D> __host__ __device__ constexpr uint32_t wgmma_tile_bytes() {
    return kWgmmaKeys * D * 2;
}
// Of one warpgroup.
template <int D> __host__ __device__ constexpr uint32_t wgmma_query_bytes() { return 64 * D * 2; }
template <int D> constexpr int wgmma_shared_bytes() {
    return 1024 + int(wgmma_tile_bytes<D>()) * kWgmmaSlots +
           kQuestions * 2 * int(wgmma_query_bytes<D>());
}

constexpr int kWgmmaPage = 16; // entries of a box

// Keys and values [slots, kv_heads, D] as boxes of a page of one head and 64 columns.
struct WgmmaPages {
    CUtensorMap k, v;
    int32_t n_slots; // 0: there are no pages, each entry has a place of its own
};

// Copies the queries of a warpgroup, tiles of 64 rows and 64 columns, and waits for them; one warp.
template <typename T, int D>
__device__ __forceinline__ void copy_queries(const AttentionArgs &args, const WgmmaSpan &span,
                                             int row0, uint32_t to) {
    constexpr int kChunks = D / 8;
    const int lane = threadIdx.x % kWarp;
    const int chunk = lane % kChunks;
    const int head0 = span.kv_head * args.group;
    const T *from = static_cast<const T *>(args.q) + chunk * 8;
#pragma unroll 4
    for (int own = lane / kChunks; own < 64; own += kWarp / kChunks) {
        const int row = row0 + own;
        const bool is_there = row < span.n_tokens * args.group;
        const int token = is_there ? span.token0 + row / args.group : span.token0;
        const int head = is_there ? head0 + row % args.group : head0;
        copy_async(to + uint32_t(chunk / 8) * (64 * 128) + swizzled(own, chunk % 8),
                   from + token * args.q_token + head * args.q_head, is_there);
    }
    copies_end_group();
    copies_wait<0>();
    show_to_products();
    __syncwarp();
}

// Copies the tiles of an item into the ring, from its place `at` on; one warpgroup.
template <typename T, int D>
__device__ __forceinline__ void copy_tiles(const AttentionArgs &args, const WgmmaSpan &span, int at,
                                           uint32_t ring, uint32_t full, uint32_t empty) {
    constexpr int kChunks = D / 8;             // of 16 bytes, a row
    constexpr int kTogether = kWarp / kChunks; // rows that a warp copies at a time
    const int lane = threadIdx.x % kWarp;
    const int key0 = threadIdx.x / kWarp % 4 * kWarp; // this warp's first of a tile
    const int chunk = lane % kChunks;
    const int32_t *table = args.table_of(span.token0);
    const auto slot_at = [&](int tile) { // of key key0 + lane; -1: nobody looks at it
        const int e = tile * kWgmmaKeys + key0 + lane;
        return tile < span.last_tile && e >= span.low_begin && e < span.high_end
                   ? int(args.slot_of(table, e))
                   : -1;
    };
    const int end = at + 2 * (span.last_tile - span.first_tile);
    int next = slot_at(span.first_tile);
    int slot_of_key = -1;
    for (int i = 0; at < end + kWgmmaLag; ++i, ++at) {
        if (at < end) {
            if (i % 2 == 0) {
                slot_of_key = next;
                next = slot_at(span.first_tile + i / 2 + 1);
            }
            const uint32_t place = uint32_t(at % kWgmmaSlots);
            if (at >= kWgmmaSlots) {
                barrier_wait(empty + place * 8, uint32_t(at / kWgmmaSlots - 1) & 1);
            }
            const T *from = static_cast<const T *>(i % 2 == 0 ? args.k : args.v) +
                            int64_t(span.kv_head) * D + chunk * 8;
            const uint32_t to =
                ring + place * wgmma_tile_bytes<D>() + uint32_t(chunk / 8) * kColumnBytes;
#pragma unroll 4
            for (int first = 0; first < kWarp; first += kTogether) {
                const int row = first + lane / kChunks;
                const int slot = __shfl_sync(kAll, slot_of_key, row);
                copy_async(to + swizzled(key0 + row, chunk % 8),
                           from + int64_t(slot < 0 ? 0 : slot) * args.kv_heads * D, slot >= 0);
            }
        }
        copies_end_group(); // empty at the end
        if (i >= kWgmmaLag) {
            copies_wait<kWgmmaLag>();
            show_to_products();
            barrier_arrive(full + uint32_t((at - kWgmmaLag) % kWgmmaSlots) * 8);
        }
    }
}

// The same by two warps, one for the keys and one for the values: a box of 16 entries and 64 columns a lane.
// Pages that nobody looks at become zeros; in the last page the values behind the end become zeros too (their
// weights are 0, but memory may hold anything; of keys, the scores are dropped).
template <typename T, int D>
__device__ __forceinline__ void copy_pages(const AttentionArgs &args, const WgmmaPages &pages,
                                           const WgmmaSpan &span, int at, bool are_values,
                                           unsigned char *ring, uint32_t full, uint32_t empty) {
    constexpr int kPages = kWgmmaKeys / kWgmmaPage; // of a tile
    constexpr uint32_t kPageBytes = kWgmmaPage * 128;
    const int lane = threadIdx.x % kWarp;
    const int page = lane % kPages;
    const int column = lane / kPages; // of 64
    const bool copies = column < D / 64;
    const int32_t *table = args.table_of(span.token0);
    const auto slot_at = [&](int tile) { // of this lane's page
        const int e = tile * kWgmmaKeys + page * kWgmmaPage;
        return tile < span.last_tile && e + kWgmmaPage > span.low_begin && e < span.high_end
                   ? int(args.slot_of(table, e))
                   : pages.n_slots;
    };
    const int cut = span.high_end % kWgmmaPage; // entries of the last page, 0: all
    const int cut_page = (span.high_end - 1) % kWgmmaKeys / kWgmmaPage;
    int next = slot_at(span.first_tile);
    at += are_values ? 1 : 0;
    for (int tile = span.first_tile; tile < span.last_tile; ++tile, at += 2) {
        const int slot = next;
        next = slot_at(tile + 1);
        const uint32_t place = uint32_t(at % kWgmmaSlots);
        if (at >= kWgmmaSlots) {
            barrier_wait(empty + place * 8, uint32_t(at / kWgmmaSlots - 1) & 1);
        }
        unsigned char *to = ring + place * wgmma_tile_bytes<D>();
        const bool is_cut = are_values && cut > 0 && tile == span.last_tile - 1;
        if (is_cut) { // by hand
            const int from = __shfl_sync(kAll, slot, cut_page);
#pragma unroll 2
            for (int c = lane; c < kWgmmaPage * (D / 8); c += kWarp) {
                const int row = c / (D / 8);
                const int chunk = c % (D / 8);
                uint4 value = make_uint4(0, 0, 0, 0);
                if (row < cut) {
                    value = *reinterpret_cast<const uint4 *>(
                        static_cast<const T *>(args.v) +
                        (int64_t(from + row) * args.kv_heads + span.kv_head) * D + chunk * 8);
                }
                *reinterpret_cast<uint4 *>(to + uint32_t(chunk / 8) * kColumnBytes +
                                           swizzled(cut_page * kWgmmaPage + row, chunk % 8)) =
                    value;
            }
            show_to_products();
            __syncwarp();
        }
        const uint32_t barrier = full + place * 8;
        if (lane == 0) {
            barrier_arrive_expecting(barrier,
                                     wgmma_tile_bytes<D>() - (is_cut ? D / 64 * kPageBytes : 0));
        }
        __syncwarp();
        if (copies && !(is_cut && page == cut_page)) {
            copy_box(shared_address(to) + uint32_t(column) * kColumnBytes +
                         uint32_t(page) * kPageBytes,
                     are_values ? &pages.v : &pages.k, column * kBoxColumns, span.kv_head, slot,
                     barrier);
        }
    }
}

// The pages of a cache of n_slots, where 16 entries lie together in it.
template <typename T, int D> WgmmaPages wgmma_pages(const AttentionArgs &args, int64_t n_slots) {
    WgmmaPages pages{};
    if (args.block_size % kWgmmaPage != 0 || encode_tensor_map() == nullptr ||
        n_slots > INT32_MAX - kWgmmaPage) {
        return pages;
    }
    const auto boxes = [&](const void *data) {
        return boxes_of<T, 3>(static_cast<const T *>(data), {D, args.kv_heads, n_slots},
                              {D, int64_t(args.kv_heads) * D}, {1, kWgmmaPage});
    };
    pages.k = boxes(args.k);
    pages.v = boxes(args.v);
    pages.n_slots = int32_t(n_slots);
    return pages;
}

} // namespace llaisys::ops::cuda
