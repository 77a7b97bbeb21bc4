// Linear in tile registers, for any number of rows, over the layout of ops/cpu/strip_kernels.hpp;
// compiled per instruction set.
//
// bf16: an output accumulates in steps of 32 values along k for every row count, so results are
// batch-invariant. Bytes: sums are exact.
//
// Bound: the bandwidth of the weights up to 32 rows, tile products for more: 16 cycles for 16 rows
// x 64 bytes x 16 outputs. With many rows a K block of a strip stays in L1 while the rows of the
// task stream from L2; sums stay in memory between blocks. Five of the eight tiles are used, for 32
// rows x 16 outputs: loads cost more than with 32 x 32, but a core whose sibling thread also uses
// tiles is a quarter faster (docs/internals/measurements/2026-11-16-xeon-amx.md).
#pragma once

#include "device/cpu/tiles.hpp"
#include "ops/cpu/strip_rows.hpp"

namespace llaisys::LLAISYS_CPU_NS {

constexpr int64_t kStrip = 16;           // outputs per tile product
constexpr int64_t kTileBlockBytes = 512; // K block for many rows, of a row
constexpr int64_t kTilePair = 2 * kTileHeight;
constexpr int64_t kTileBytes = 16 * kTileRowBytes; // of a strip, for kTileRowBytes of a row
constexpr int64_t kAccRow = kPanel * int64_t(sizeof(float));

// Tiles 0 and 1 are accumulators, 2 and 3 rows of x, 4 weights. Fewer than 16 rows use lower tiles.
inline TileShapes linear_shapes(int64_t height) {
    const int rows = int(height);
    return {{rows, rows, rows, rows, 16, 0, 0, 0}, {64, 64, 64, 64, 64, 0, 0, 0}};
}

// acc [32, 16] += rows [row, row + 32) of x, or 16 of them, n bytes from k on, times the strip w,
// while `fetch` steps; acc is uninitialised at the first byte. Rows of acc are kPanel apart.
template <typename Tiles, typename Products, bool has_second, typename Fetch>
void multiply_rows(const TileRows &x, int64_t row, int64_t k, int64_t n, const char *w,
                   typename Products::Sum *acc, Fetch &fetch) {
    typename Products::Sum *second_acc = acc + kTileHeight * kPanel;
    const int64_t step = x.height * kTileRowBytes;
    const int64_t to_second = x.row_block();
    const char *from = x.tile(row, k);
    if (k == 0) {
        Tiles::template zero<0>();
        if constexpr (has_second) {
            Tiles::template zero<1>();
        }
    } else {
        Tiles::template load<0>(acc, kAccRow);
        if constexpr (has_second) {
            Tiles::template load<1>(second_acc, kAccRow);
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
    Tiles::template store<0>(acc, kAccRow);
    if constexpr (has_second) {
        Tiles::template store<1>(second_acc, kAccRow);
    }
}

// acc [m, 16] += all rows of the task, n bytes from k on, times the strip w.
template <typename Tiles, typename Products, typename Fetch>
void multiply_strip(const TileTask &task, int64_t k, int64_t n, const char *w,
                    typename Products::Sum *acc, Fetch fetch) {
    for (int64_t row = 0; row < task.out.m; row += kTilePair, acc += kTilePair * kPanel) {
        if (task.out.m - row > kTileHeight) {
            multiply_rows<Tiles, Products, true>(task.x, row, k, n, w, acc, fetch);
        } else {
            multiply_rows<Tiles, Products, false>(task.x, row, k, n, w, acc, fetch);
        }
    }
}

// Up to 32 rows: a strip is read once, as a stream.
template <typename Tiles, typename Products> void stream_strips(const TileTask &task) {
    alignas(64) typename Products::Sum acc[kTilePair * kPanel];
    const int64_t strip_bytes = task.x.bytes / kTileRowBytes * kTileBytes;
    const char *w = static_cast<const char *>(task.out.w);
    for (int64_t first = 0; first < task.out.n; first += kStrip, w += strip_bytes) {
        const int64_t column = first % kPanel;
        multiply_strip<Tiles, Products>(task, 0, task.x.bytes, w, acc + column,
                                        NearFetch<int(kTileBytes / 64)>{w + kStreamBytes});
        if (column != 0 || first + kStrip >= task.out.n) {
            Products::finish(task, first / kPanel, acc);
        }
    }
}

// More rows: one K block after the other; prefetches two strips ahead.
template <typename Tiles, typename Products> void block_strips(const TileTask &task) {
    // Sums of a panel: [rows, 32].
    alignas(64) typename Products::Sum acc[kTaskPanels * kTileTaskRows * kPanel];
    const int64_t panels = (task.out.n + kPanel - 1) / kPanel;
    const int64_t strips = 2 * panels;
    const int64_t k_all = task.x.bytes;
    const int64_t strip_bytes = k_all / kTileRowBytes * kTileBytes;
    const char *weights = static_cast<const char *>(task.out.w);
    const int64_t rows = ops::cpu::round_up(task.out.m, kTilePair);
    for (int64_t k = 0; k < k_all; k += kTileBlockBytes) {
        const int64_t n = k_all - k < kTileBlockBytes ? k_all - k : kTileBlockBytes;
        const char *block = weights + k / kTileRowBytes * kTileBytes;
        const char *next_block = weights + (k + n) % k_all / kTileRowBytes * kTileBytes;
        for (int64_t s = 0; s < strips; ++s) {
            const int64_t ahead = s + 2;
            const char *next = ahead < strips ? block + ahead * strip_bytes
                                              : next_block + (ahead - strips) * strip_bytes;
            multiply_strip<Tiles, Products>(task, k, n, block + s * strip_bytes,
                                            acc + s / 2 * rows * kPanel + s % 2 * kStrip,
                                            FarFetch{next, next + n / kTileRowBytes * kTileBytes,
                                                     next, kTileBytes / (rows / kTilePair)});
        }
    }
    for (int64_t p = 0; p < panels; ++p) {
        Products::finish(task, p, acc + p * rows * kPanel);
    }
}

template <typename Tiles, typename Products> void linear_tiles(const TileTask &task) {
    Tiles::configure(linear_shapes(task.x.height));
    if (task.out.m <= kTilePair) {
        stream_strips<Tiles, Products>(task);
    } else {
        block_strips<Tiles, Products>(task);
    }
    Tiles::release();
}

} // namespace llaisys::LLAISYS_CPU_NS
