// Linear by dot products of vectors, 4-byte unit by unit (VDPBF16PS, VPDPBUSD), over the layout of
// ops/cpu/strip_kernels.hpp. An output adds unit after unit along k for every row count, so results
// do not depend on the batch. Included after simd_avx512.hpp by files that define a Dot: a type of
// products with Vector, 16 sums, and dot(sums, w, x).
//
// Bound: the bandwidth of the weights for few rows, dot products for more: two vectors of 16 outputs
// per cycle and unit. A K block of a panel streams from L2, the rows of its register tile stay in L1;
// sums stay in memory between blocks.
#pragma once

#include "ops/cpu/dot_tile.hpp"
#include "ops/cpu/strip_rows.hpp"

namespace llaisys::LLAISYS_CPU_NS {

constexpr int kHeight = 8;               // rows of a register tile
constexpr int64_t kRowBlock = 16;        // rows of a block of TileRows
constexpr int64_t kVectorTaskRows = 128; // largest number of rows of a task
constexpr int64_t kVectorBlock = 512; // K block for more than one register tile, in bytes of a row
constexpr int64_t kPanelUnit = kPanel * kUnitBytes; // bytes of a unit of a panel
constexpr int64_t kStepBytes = kTileRowBytes / kUnitBytes * kPanelUnit;

// acc [rows, 32] += rows from x on, n bytes of each, times a panel from w on. x: at this k; its next
// kTileRowBytes are x_step further. is_first: acc is uninitialised.
template <typename Dot, int rows, typename Fetch>
void unit_tile(const char *x, int64_t x_step, int64_t n, const char *w, bool is_first,
               typename Dot::Sum *acc, Fetch &fetch) {
    using Vector = typename Dot::Vector;
    Vector low[rows];
    Vector high[rows];
#pragma GCC unroll 16
    for (int r = 0; r < rows; ++r) {
        const typename Dot::Sum *from = acc + r * kPanel;
        low[r] = is_first ? Vector{} : Vector(_mm512_loadu_si512(from));
        high[r] = is_first ? Vector{} : Vector(_mm512_loadu_si512(from + 16));
    }
    for (; n > 0; n -= kTileRowBytes, x += x_step) {
        fetch.step();
        const char *unit = x;
        for (const char *end = x + kTileRowBytes; unit < end; unit += 16, w += 4 * kPanelUnit) {
            add_unit<Dot>(low, high, unit, kTileRowBytes, w);
            add_unit<Dot>(low, high, unit + 4, kTileRowBytes, w + kPanelUnit);
            add_unit<Dot>(low, high, unit + 8, kTileRowBytes, w + 2 * kPanelUnit);
            add_unit<Dot>(low, high, unit + 12, kTileRowBytes, w + 3 * kPanelUnit);
        }
    }
#pragma GCC unroll 16
    for (int r = 0; r < rows; ++r) {
        _mm512_storeu_si512(acc + r * kPanel, __m512i(low[r]));
        _mm512_storeu_si512(acc + r * kPanel + 16, __m512i(high[r]));
    }
}

// The same for m <= kHeight rows.
template <typename Dot, int rows = kHeight, typename Fetch>
inline void unit_rows(int64_t m, const char *x, int64_t x_step, int64_t n, const char *w,
                      bool is_first, typename Dot::Sum *acc, Fetch &fetch) {
    if constexpr (rows > 1) {
        if (m < rows) {
            return unit_rows<Dot, rows - 1>(m, x, x_step, n, w, is_first, acc, fetch);
        }
    }
    unit_tile<Dot, rows>(x, x_step, n, w, is_first, acc, fetch);
}

// acc [m, 32] += all rows of the task, n bytes from k on, times a panel from w on.
template <typename Dot, typename Fetch>
void multiply_units(const TileTask &task, int64_t k, int64_t n, const char *w,
                    typename Dot::Sum *acc, Fetch fetch) {
    for (int64_t block = 0; block < task.out.m; block += kRowBlock) {
        const int64_t rows = smaller(task.out.m - block, kRowBlock);
        const int64_t height = rows > kHeight ? (rows + 1) / 2 : rows;
        const char *x = task.x.tile(block, k);
        for (int64_t r = 0; r < rows; r += height) {
            unit_rows<Dot>(smaller(rows - r, height), x + r * kTileRowBytes,
                           task.x.height * kTileRowBytes, n, w, k == 0, acc + (block + r) * kPanel,
                           fetch);
        }
    }
}

// One register tile: the weights are a stream.
template <typename Dot>
void stream_panels(const TileTask &task, int64_t panels, const char *w, typename Dot::Sum *acc) {
    for (int64_t p = 0; p < panels; ++p, w += task.x.bytes * kPanel) {
        multiply_units<Dot>(task, 0, task.x.bytes, w, acc + p * task.out.m * kPanel,
                            NearFetch<int(kStepBytes / 64)>{w + kStreamBytes});
    }
}

// More rows: K block after K block of all panels; the next block of weights is prefetched.
template <typename Dot>
void block_panels(const TileTask &task, int64_t panels, const char *weights,
                  typename Dot::Sum *acc) {
    const int64_t k_all = task.x.bytes;
    const int64_t panel_bytes = k_all * kPanel;
    const int64_t tiles = (task.out.m + kHeight - 1) / kHeight; // of the rows
    for (int64_t k = 0; k < k_all; k += kVectorBlock) {
        const int64_t n = smaller(k_all - k, kVectorBlock);
        for (int64_t p = 0; p < panels; ++p) {
            const char *w = weights + p * panel_bytes + k * kPanel;
            const char *next =
                p + 1 < panels ? w + panel_bytes : weights + (k + n) % k_all * kPanel;
            multiply_units<Dot>(
                task, k, n, w, acc + p * task.out.m * kPanel,
                FarFetch{next, next + n * kPanel, next, (kStepBytes + tiles - 1) / tiles});
        }
    }
}

template <typename Dot> void linear_units(const TileTask &task) {
    alignas(64) typename Dot::Sum acc[kTaskPanels * kVectorTaskRows * kPanel];
    const int64_t panels = (task.out.n + kPanel - 1) / kPanel;
    const int64_t panel_bytes = task.x.bytes * kPanel;
    const char *w = static_cast<const char *>(task.out.w);
    for (int64_t first = 0; first < panels; first += kTaskPanels, w += kTaskPanels * panel_bytes) {
        const int64_t some = smaller(panels - first, kTaskPanels);
        (task.out.m <= kHeight ? stream_panels<Dot> : block_panels<Dot>)(task, some, w, acc);
        for (int64_t p = 0; p < some; ++p) {
            Dot::finish(task, first + p, acc + p * task.out.m * kPanel);
        }
    }
}

} // namespace llaisys::LLAISYS_CPU_NS
