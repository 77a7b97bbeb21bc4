// Linear in tile registers, for any number of rows, over the layout of ops/cpu/strip_kernels.hpp;
// compiled per instruction set.
//
// bf16: an output accumulates in steps of 32 values along k for every row count, so results are
// batch-invariant. Bytes: sums are exact.
//
// Bound: the bandwidth of the weights up to 32 rows, tile products for more: 16 cycles for 16 rows
// x 64 bytes x 16 outputs. With many rows, a K block of 32 rows of x stays in L1 while the strips of the
// task stream from L2; sums stay in memory between blocks. (The other way round, with the rows from L2,
// takes twice the bytes per product.) These loops use five of the eight tiles, for 32 rows x 16 outputs:
// loads cost more than with 32 x 32, but a core whose sibling thread also uses tiles is a quarter faster
// (docs/internals/measurements/2026-11-16-xeon-amx.md).
#pragma once

#include "device/cpu/tiles.hpp"
#include "ops/cpu/strip_rows.hpp"

#include <type_traits>
#include <utility>

namespace llaisys::LLAISYS_CPU_NS {

constexpr int64_t kStrip = 16;           // outputs per tile product
constexpr int64_t kTileBlockBytes = 512; // approximate K block for many rows, of a row
constexpr int64_t kTilePair = 2 * kTileHeight;
constexpr int64_t kTileTaskRows = 256;             // largest number of rows of a task
constexpr int64_t kTileBytes = 16 * kTileRowBytes; // of a strip, for kTileRowBytes of a row
constexpr int64_t kSumBytes = 4;                   // of f32 and i32

// Streams: tiles 0 to 3 are accumulators, 4 and 5 rows of x, the rest weights. Blocks: 0 and 1 are
// accumulators, 2 and 3 rows of x, 4 weights. Fewer than 16 rows use lower tiles.
inline TileShapes linear_shapes(int64_t height) {
    const int rows = int(height);
    return {{rows, rows, rows, rows, rows, 16, 16, 16}, {64, 64, 64, 64, 64, 64, 64, 64}};
}

// 32 x 16 sums in memory, before and after a product.
template <typename Sum> struct PairSums {
    const Sum *before; // rows kPanel apart; null: zeros
    Sum *after;
    int64_t after_row; // distance of its rows
};

// sums [32, 16] += rows [row, row + 32) of x, or 16 of them, n bytes from k on, times the strip w,
// while `fetch` steps.
template <typename Tiles, typename Products, bool has_second, typename Fetch>
void multiply_rows(const TileRows &x, int64_t row, int64_t k, int64_t n, const char *w,
                   const PairSums<typename Products::Sum> &sums, Fetch &fetch) {
    const int64_t step = x.height * kTileRowBytes;
    const int64_t to_second = x.row_block();
    const char *from = x.tile(row, k);
    constexpr int64_t kBeforeBytes = kPanel * kSumBytes;
    const int64_t after_bytes = sums.after_row * kSumBytes;
    if (sums.before == nullptr) {
        Tiles::template zero<0>();
        if constexpr (has_second) {
            Tiles::template zero<1>();
        }
    } else {
        Tiles::template load<0>(sums.before, kBeforeBytes);
        if constexpr (has_second) {
            Tiles::template load<1>(sums.before + kTileHeight * kPanel, kBeforeBytes);
        }
    }
    for (int64_t i = 0; i < n; i += kTileRowBytes, w += kTileBytes, from += step) {
        fetch.step();
        Tiles::template load<4>(w, kTileRowBytes);
        Tiles::template load<2>(from, kTileRowBytes);
        Products::template dot_tiles<Tiles, 0, 2, 4>();
        if constexpr (has_second) {
            Tiles::template load<3>(from + to_second, kTileRowBytes);
            Products::template dot_tiles<Tiles, 1, 3, 4>();
        }
    }
    Tiles::template store<0>(sums.after, after_bytes);
    if constexpr (has_second) {
        Tiles::template store<1>(sums.after + kTileHeight * sums.after_row, after_bytes);
    }
}

// The same for the rows that the task has.
template <typename Tiles, typename Products, typename Fetch>
void multiply_pair(const TileTask &task, int64_t row, int64_t k, int64_t n, const char *w,
                   const PairSums<typename Products::Sum> &sums, Fetch &fetch) {
    if (task.out.m - row > kTileHeight) {
        multiply_rows<Tiles, Products, true>(task.x, row, k, n, w, sums, fetch);
    } else {
        multiply_rows<Tiles, Products, false>(task.x, row, k, n, w, sums, fetch);
    }
}

// Strips that are read side by side, half of them with more than 16 rows: several streams are faster
// than one.
constexpr int64_t kStreams = 4;

// Accumulators of strip s: tile s, or tiles 2s and 2s + 1 for two tiles of rows.
template <typename Tiles, typename Products, int s, bool has_second> struct StripSums {
    static constexpr int kFirst = has_second ? 2 * s : s;
    static constexpr int kWeights = has_second ? 6 + s % 2 : 5 + s % 3;

    static void zero() {
        Tiles::template zero<kFirst>();
        if constexpr (has_second) {
            Tiles::template zero<kFirst + 1>();
        }
    }
    static void add(const char *w) {
        Tiles::template load<kWeights>(w, kTileRowBytes);
        Products::template dot_tiles<Tiles, kFirst, 4, kWeights>();
        if constexpr (has_second) {
            Products::template dot_tiles<Tiles, kFirst + 1, 5, kWeights>();
        }
    }
    // to: 32 sums per row
    static void store(typename Products::Sum *to) {
        Tiles::template store<kFirst>(to, kPanel * kSumBytes);
        if constexpr (has_second) {
            Tiles::template store<kFirst + 1>(to + kTileHeight * kPanel, kPanel * kSumBytes);
        }
    }
};

// Up to 32 rows times sizeof...(s) adjacent strips from w on; acc: panels of [32, 32].
template <typename Tiles, typename Products, bool has_second, size_t... s>
void stream_side_by_side(const TileRows &x, const char *w, typename Products::Sum *acc,
                         std::index_sequence<s...>) {
    constexpr int64_t kStrips = sizeof...(s);
    constexpr int64_t kAhead = kStreamBytes / kStrips;
    const int64_t strip_bytes = x.bytes / kTileRowBytes * kTileBytes;
    const int64_t to_second = x.row_block();
    const char *from = x.tile(0, 0);
    (StripSums<Tiles, Products, int(s), has_second>::zero(), ...);
    for (int64_t i = 0; i < strip_bytes; i += kTileBytes, from += x.height * kTileRowBytes) {
        // Near the end, the beginnings of the next strips.
        const char *soon =
            w + i + kAhead + (i + kAhead < strip_bytes ? 0 : (kStrips - 1) * strip_bytes);
        for (int64_t line = 0; line < kTileBytes; line += 64) {
            (__builtin_prefetch(soon + int64_t(s) * strip_bytes + line, 0, 3), ...);
        }
        Tiles::template load<4>(from, kTileRowBytes);
        if constexpr (has_second) {
            Tiles::template load<5>(from + to_second, kTileRowBytes);
        }
        (StripSums<Tiles, Products, int(s), has_second>::add(w + int64_t(s) * strip_bytes + i),
         ...);
    }
    (StripSums<Tiles, Products, int(s), has_second>::store(
         acc + int64_t(s) / 2 * kTilePair * kPanel + int64_t(s) % 2 * kStrip),
     ...);
}

// Up to 32 rows: a strip is read once.
template <typename Tiles, typename Products, bool has_second>
void stream_strips(const TileTask &task) {
    alignas(64) typename Products::Sum acc[kStreams / 2 * kTilePair * kPanel];
    constexpr int64_t kMost = has_second ? kStreams / 2 : kStreams;
    const int64_t strip_bytes = task.x.bytes / kTileRowBytes * kTileBytes;
    const char *w = static_cast<const char *>(task.out.w);
    const int64_t strips = (task.out.n + kStrip - 1) / kStrip;
    for (int64_t done = 0; done < strips;) {
        int64_t n = smaller(strips - done, kMost);
        n -= n % 2 != 0 && n > 1 ? 1 : 0;
        if (n == kMost) {
            stream_side_by_side<Tiles, Products, has_second>(
                task.x, w, acc, std::make_index_sequence<size_t(kMost)>());
        } else if (n == 2) {
            stream_side_by_side<Tiles, Products, has_second>(task.x, w, acc,
                                                             std::make_index_sequence<2>());
        } else {
            stream_side_by_side<Tiles, Products, has_second>(task.x, w, acc,
                                                             std::make_index_sequence<1>());
        }
        for (int64_t s = 0; s < n; s += 2) {
            Products::finish(task, (done + s) * kStrip / kPanel, acc + s / 2 * kTilePair * kPanel);
        }
        w += n * strip_bytes;
        done += n;
    }
}

// Prefetches the weights of a strip's K block into L1, kAhead bytes before they are used, and a part of
// the following block into L2.
struct BlockFetch {
    static constexpr int64_t kAhead = 2 * kTileBytes;
    const char *soon;
    const char *end;        // of the strip's K block
    const char *next_strip; // follows at `end`
    const char *later;
    int64_t pace; // bytes of the following block per step

    void step() {
        soon = soon == end ? next_strip : soon;
        for (int64_t i = 0; i < kTileBytes; i += 64) {
            __builtin_prefetch(soon + i, 0, 3);
        }
        for (int64_t i = 0; i < pace; i += 64) {
            __builtin_prefetch(later + i, 0, 2);
        }
        soon += kTileBytes;
        later += pace;
    }
};

// The results of 32 rows from `row` on and panel p if sums are written there as they are; null if not.
template <typename Sum> Sum *sums_in_place(const TileTask &task, int64_t row, int64_t p) {
    const ops::cpu::LinearTask &out = task.out;
    const bool is_whole = row + kTilePair <= out.m && (p + 1) * kPanel <= out.n;
    const bool is_plain = out.bias == nullptr && out.out_dtype == LLAISYS_DTYPE_F32;
    return std::is_same<Sum, float>::value && is_plain && is_whole
               ? static_cast<Sum *>(out.out) + row * out.ldo + p * kPanel
               : nullptr;
}

// Finishes the rows of panel p whose sums are not in place; acc [m, 32].
template <typename Products>
void finish_rest(const TileTask &task, int64_t p, const typename Products::Sum *acc) {
    int64_t row = 0;
    while (sums_in_place<typename Products::Sum>(task, row, p) != nullptr) {
        row += kTilePair;
    }
    if (row < task.out.m) {
        TileTask rest = task;
        rest.out.m -= row;
        rest.out.out =
            static_cast<float *>(task.out.out) + row * task.out.ldo; // row > 0: it is f32
        Products::finish(rest, p, acc + row * kPanel);
    }
}

// More rows: one K block after the other, for 32 rows of x and all strips at a time.
template <typename Tiles, typename Products> void block_strips(const TileTask &task) {
    using Sum = typename Products::Sum;
    // Sums of a panel: [rows, 32].
    alignas(64) Sum acc[kTaskPanels * kTileTaskRows * kPanel];
    const int64_t panels = (task.out.n + kPanel - 1) / kPanel;
    const int64_t strips = 2 * panels;
    const int64_t k_all = task.x.bytes;
    const int64_t strip_bytes = k_all / kTileRowBytes * kTileBytes;
    const char *weights = static_cast<const char *>(task.out.w);
    const int64_t rows = ops::cpu::round_up(task.out.m, kTilePair);
    const int64_t blocks = larger((k_all + kTileBlockBytes / 2) / kTileBlockBytes, 1);
    const int64_t block_bytes = ops::cpu::round_up((k_all + blocks - 1) / blocks, kTileRowBytes);
    const int64_t pace = ops::cpu::round_up(kTileBytes / (rows / kTilePair), 64);
    for (int64_t k = 0; k < k_all; k += block_bytes) {
        const int64_t n = smaller(k_all - k, block_bytes);
        const int64_t steps = n / kTileRowBytes;
        const bool is_last = k + n == k_all;
        const char *block = weights + k / kTileRowBytes * kTileBytes;
        const char *next = is_last ? weights + strips * strip_bytes : block + steps * kTileBytes;
        for (int64_t row = 0; row < task.out.m; row += kTilePair) {
            for (int64_t s = 0; s < strips; ++s) {
                const char *w = block + s * strip_bytes;
                BlockFetch fetch{w + BlockFetch::kAhead, w + steps * kTileBytes,
                                 s + 1 < strips ? w + strip_bytes : block,
                                 next + s * strip_bytes + row / kTilePair * steps * pace, pace};
                const int64_t column = s % 2 * kStrip;
                Sum *kept = acc + (s / 2 * rows + row) * kPanel + column;
                Sum *out = is_last ? sums_in_place<Sum>(task, row, s / 2) : nullptr;
                PairSums<Sum> sums = {k == 0 ? nullptr : kept, kept, kPanel};
                if (out != nullptr) {
                    sums.after = out + column;
                    sums.after_row = task.out.ldo;
                }
                multiply_pair<Tiles, Products>(task, row, k, n, w, sums, fetch);
            }
        }
    }
    for (int64_t p = 0; p < panels; ++p) {
        finish_rest<Products>(task, p, acc + p * rows * kPanel);
    }
}

template <typename Tiles, typename Products> void linear_tiles(const TileTask &task) {
    Tiles::configure(linear_shapes(task.x.height));
    if (task.out.m <= kTileHeight) {
        stream_strips<Tiles, Products, false>(task);
    } else if (task.out.m <= kTilePair) {
        stream_strips<Tiles, Products, true>(task);
    } else {
        block_strips<Tiles, Products>(task);
    }
    Tiles::release();
}

} // namespace llaisys::LLAISYS_CPU_NS
