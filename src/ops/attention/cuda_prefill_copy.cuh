// What a block of cuda_prefill_wgmma.cuh works on, and how keys and values come into its ring of tiles
// through the block table.
//
// Where 16 entries lie together (blocks of 16, 32, ..), two warps copy boxes of 16 entries and 64 columns.
// Otherwise a warpgroup copies row by row (cp.async, 16 bytes a lane): slower, since the fence that each tile
// needs waits for all copies that are under way.
#pragma once

#include "ops/attention/cuda_args.cuh"
#include "ops/cuda/bulk.cuh"
#include "ops/cuda/tensor_map.cuh"
#include "ops/cuda/wgmma.cuh"

namespace llaisys::ops::cuda {

constexpr int kWgmmaRows = 128;  // of a block
constexpr int kWgmmaKeys = 128;  // of a tile
constexpr int kWgmmaGroup = 128; // threads of a warpgroup
constexpr int kWgmmaThreads = 3 * kWgmmaGroup;
constexpr int kWgmmaSlots = 5; // tiles in the ring
constexpr int kWgmmaLag = 2;   // tiles of which a copying thread waits for the oldest
constexpr uint32_t kColumnBytes = kWgmmaKeys * 128; // of 64 columns of a tile of keys or values

template <int D> __host__ __device__ constexpr uint32_t wgmma_tile_bytes() {
    return kWgmmaKeys * D * 2;
}
template <int D> constexpr int wgmma_shared_bytes() {
    return 1024 + int(wgmma_tile_bytes<D>()) * kWgmmaSlots + kWgmmaRows * D * 2;
}

constexpr int kWgmmaPage = 16; // entries of a box

// Keys and values [slots, kv_heads, D] as boxes of a page of one head and 64 columns.
struct WgmmaPages {
    CUtensorMap k, v;
    int32_t n_slots; // 0: there are no pages, each entry has a place of its own
};

// What a block works on.
struct WgmmaSpan {
    int token0, n_tokens;                         // of its rows
    int low_begin, high_begin, low_end, high_end; // smallest and largest begin and end of these
    int first_tile, last_tile;

    // All but the first two, by a whole warp.
    __device__ __forceinline__ void find_lists(const AttentionArgs &args) {
        low_begin = low_end = INT32_MAX;
        high_begin = high_end = 0;
        for (int t = threadIdx.x % kWarp; t < n_tokens; t += kWarp) {
            const int begin = args.begin[token0 + t];
            const int end = args.end[token0 + t];
            low_begin = min(low_begin, begin);
            high_begin = max(high_begin, begin);
            low_end = min(low_end, end);
            high_end = max(high_end, end);
        }
        low_begin = __reduce_min_sync(kAll, low_begin);
        high_begin = __reduce_max_sync(kAll, high_begin);
        low_end = __reduce_min_sync(kAll, low_end);
        high_end = __reduce_max_sync(kAll, high_end);
        first_tile = low_begin / kWgmmaKeys;
        last_tile = (high_end + kWgmmaKeys - 1) / kWgmmaKeys;
    }
};

// Copies this block's tiles into the ring; one warpgroup.
template <typename T, int D>
__device__ __forceinline__ void copy_tiles(const AttentionArgs &args, const WgmmaSpan &span,
                                           int kv_head, uint32_t ring, uint32_t full,
                                           uint32_t empty) {
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
    const int n_items = 2 * (span.last_tile - span.first_tile);
    int next = slot_at(span.first_tile);
    int slot_of_key = -1;
    for (int item = 0; item < n_items + kWgmmaLag; ++item) {
        if (item < n_items) {
            if (item % 2 == 0) {
                slot_of_key = next;
                next = slot_at(span.first_tile + item / 2 + 1);
            }
            const uint32_t place = uint32_t(item % kWgmmaSlots);
            if (item >= kWgmmaSlots) {
                barrier_wait(empty + place * 8, uint32_t(item / kWgmmaSlots - 1) & 1);
            }
            const T *from = static_cast<const T *>(item % 2 == 0 ? args.k : args.v) +
                            int64_t(kv_head) * D + chunk * 8;
            const uint32_t to =
                ring + place * wgmma_tile_bytes<D>() + uint32_t(chunk / 8) * kColumnBytes;
#pragma unroll 4
            for (int i = 0; i < kWarp; i += kTogether) {
                const int row = i + lane / kChunks;
                const int slot = __shfl_sync(kAll, slot_of_key, row);
                copy_async(to + swizzled(key0 + row, chunk % 8),
                           from + int64_t(slot < 0 ? 0 : slot) * args.kv_heads * D, slot >= 0);
            }
        }
        copies_end_group(); // empty at the end
        if (item >= kWgmmaLag) {
            copies_wait<kWgmmaLag>();
            show_to_products();
            barrier_arrive(full + uint32_t((item - kWgmmaLag) % kWgmmaSlots) * 8);
        }
    }
}

// The same by two warps, one for the keys and one for the values: a box of 16 entries and 64 columns a lane.
// Pages that nobody looks at become zeros; in the last page the values behind the end become zeros too (their
// weights are 0, but memory may hold anything; of keys, the scores are dropped).
template <typename T, int D>
__device__ __forceinline__ void copy_pages(const AttentionArgs &args, const WgmmaPages &pages,
                                           const WgmmaSpan &span, int kv_head, bool are_values,
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
    int item = are_values ? 1 : 0;
    for (int tile = span.first_tile; tile < span.last_tile; ++tile, item += 2) {
        const int slot = next;
        next = slot_at(tile + 1);
        const uint32_t place = uint32_t(item % kWgmmaSlots);
        if (item >= kWgmmaSlots) {
            barrier_wait(empty + place * 8, uint32_t(item / kWgmmaSlots - 1) & 1);
        }
        unsigned char *to = ring + place * wgmma_tile_bytes<D>();
        const bool is_cut = are_values && cut > 0 && tile == span.last_tile - 1;
        if (is_cut) { // by hand
            const int from = __shfl_sync(kAll, slot, cut_page);
#pragma unroll
            for (int c = lane; c < kWgmmaPage * (D / 8); c += kWarp) {
                const int row = c / (D / 8);
                const int chunk = c % (D / 8);
                uint4 value = make_uint4(0, 0, 0, 0);
                if (row < cut) {
                    value = *reinterpret_cast<const uint4 *>(
                        static_cast<const T *>(args.v) +
                        (int64_t(from + row) * args.kv_heads + kv_head) * D + chunk * 8);
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
            copy_box(
                shared_address(to) + uint32_t(column) * kColumnBytes + uint32_t(page) * kPageBytes,
                are_values ? &pages.v : &pages.k, column * kBoxColumns, kv_head, slot, barrier);
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
