// The register tile that linear and attention share: a few rows of x times a panel of 32 columns.
// Every column is one lane that adds strictly along k, so the shape of a tile never shows in the
// result. Compiled per instruction set.
#pragma once

#include "device/cpu/simd.hpp"
#include "ops/cpu/kernels.hpp"

namespace llaisys::LLAISYS_CPU_NS {

using ops::cpu::kPanel;

// Columns [c, c + kLanes) and [c + 16, c + 16 + kLanes) of one row of a panel, c < 16.
inline void load_columns(const float *row, int c, vf &low, vf &high) {
    low = load(row + c);
    high = load(row + 16 + c);
}
inline void load_columns(const f16_t *row, int c, vf &low, vf &high) {
    low = load(row + c);
    high = load(row + 16 + c);
}
inline void load_columns(const bf16_t *row, int c, vf &low, vf &high) {
    split_pairs(load_raw_pairs(row + 2 * c), low, high);
}

// Where the rows of a panel lie: k by k at a fixed distance, or each at its own place (there bf16
// columns are in their natural order).
template <typename T> struct DenseRows {
    const T *p;
    int64_t stride;
    void columns(int k, int c, vf &low, vf &high) const {
        load_columns(p + k * stride, c, low, high);
    }
    void advance(int k) { p += k * stride; }
};
template <typename T> struct ListedRows {
    const T *p;
    const int64_t *offset; // of each row from p
    void columns(int k, int c, vf &low, vf &high) const {
        low = load(p + offset[k] + c);
        high = load(p + offset[k] + 16 + c);
    }
    void advance(int k) { offset += k; }
};

// What a tile brings nearer while it computes: some cache lines for every four k.
struct NoFetch {
    void step() {}
    NoFetch after(int64_t) const { return {}; }
};

// `lines` lines a step into the first cache: the weights that this very tile will want soon.
template <int lines> struct NearFetch {
    const char *next;
    void step() {
        for (int i = 0; i < lines; ++i) {
            __builtin_prefetch(next + i * 64, 0, 3);
        }
        next += lines * 64;
    }
    NearFetch after(int64_t) const { return *this; }
};

// [next, end) into the second cache, evenly over the tiles of a block: the block after it.
struct FarFetch {
    const char *next;
    const char *end;
    int64_t lines; // a step
    void step() {
        for (int64_t i = 0; i < lines && next < end; ++i, next += 64) {
            __builtin_prefetch(next, 0, 2);
        }
    }
    // What is left to the next tile after one of `steps` steps.
    FarFetch after(int64_t steps) const { return {next + steps * lines * 64, end, lines}; }
};

template <int rows, int pairs> struct Accumulators {
    vf low[rows][pairs];
    vf high[rows][pairs];
};

// One k, number `k` from where w stands: the products with lane `lane` of each row's x.
template <int lane, int rows, int pairs, typename W>
inline __attribute__((always_inline)) void
tile_step(Accumulators<rows, pairs> &sums, const quad (&x)[rows], const W &w, int k, int column) {
#pragma GCC unroll 8
    for (int p = 0; p < pairs; ++p) {
        vf low;
        vf high;
        w.columns(k, column + p * kLanes, low, high);
#pragma GCC unroll 16
        for (int r = 0; r < rows; ++r) {
            sums.low[r][p] = fma_lane<lane>(low, x[r], sums.low[r][p]);
            sums.high[r][p] = fma_lane<lane>(high, x[r], sums.high[r][p]);
        }
    }
}

// acc[r, c] += sum over k of x[r, k] * w[k, c] for the columns [column, column + pairs * kLanes)
// and those 16 further. x rows are ldx apart, rows of acc lda.
template <int rows, int pairs, typename W, typename F>
void tile(const float *x, int64_t ldx, W w, float *acc, int64_t lda, int64_t k, int column,
          F fetch) {
    Accumulators<rows, pairs> sums;
#pragma GCC unroll 16
    for (int r = 0; r < rows; ++r) {
#pragma GCC unroll 8
        for (int p = 0; p < pairs; ++p) {
            sums.low[r][p] = load(acc + r * lda + column + p * kLanes);
            sums.high[r][p] = load(acc + r * lda + column + 16 + p * kLanes);
        }
    }
    quad xs[rows];
    int64_t i = 0;
    for (; i + 4 <= k; i += 4) {
        fetch.step();
#pragma GCC unroll 16
        for (int r = 0; r < rows; ++r) {
            xs[r] = load_quad(x + r * ldx + i);
        }
        tile_step<0>(sums, xs, w, 0, column);
        tile_step<1>(sums, xs, w, 1, column);
        tile_step<2>(sums, xs, w, 2, column);
        tile_step<3>(sums, xs, w, 3, column);
        w.advance(4);
    }
    for (; i < k; ++i, w.advance(1)) {
#pragma GCC unroll 16
        for (int r = 0; r < rows; ++r) {
            xs[r] = load_single(x + r * ldx + i);
        }
        tile_step<0>(sums, xs, w, 0, column);
    }
#pragma GCC unroll 16
    for (int r = 0; r < rows; ++r) {
#pragma GCC unroll 8
        for (int p = 0; p < pairs; ++p) {
            store(acc + r * lda + column + p * kLanes, sums.low[r][p]);
            store(acc + r * lda + column + 16 + p * kLanes, sums.high[r][p]);
        }
    }
}

// A whole panel for `n` <= kMaxTileRows rows.
template <int rows = kMaxTileRows, typename W, typename F>
inline void panel_rows(int64_t n, const float *x, int64_t ldx, const W &w, float *acc, int64_t lda,
                       int64_t k, const F &fetch) {
    if constexpr (rows > 1) {
        if (n < rows) {
            return panel_rows<rows - 1>(n, x, ldx, w, acc, lda, k, fetch);
        }
    }
    constexpr int pairs = tile_vectors(rows) / 2;
    tile<rows, pairs>(x, ldx, w, acc, lda, k, 0, fetch);
    for (int column = pairs * kLanes; column < 16; column += pairs * kLanes) {
        tile<rows, pairs>(x, ldx, w, acc, lda, k, column, NoFetch());
    }
}

// A whole panel for any number of rows, in tiles of nearly equal height.
template <typename W, typename F = NoFetch>
void panel(int64_t m, const float *x, int64_t ldx, const W &w, float *acc, int64_t lda, int64_t k,
           F fetch = F()) {
    int64_t tiles = (m + kMaxTileRows - 1) / kMaxTileRows;
    for (int64_t first = 0; tiles > 0; --tiles) {
        const int64_t n = (m - first + tiles - 1) / tiles;
        panel_rows(n, x + first * ldx, ldx, w, acc + first * lda, lda, k, fetch);
        fetch = fetch.after(k / 4);
        first += n;
    }
}

} // namespace llaisys::LLAISYS_CPU_NS
