// Products of pairs of bf16 in tile registers. Included after simd_<isa>.hpp and the definition of
// PairTiles (device/cpu/tiles.hpp); compiled per instruction set.
//
// Bound: a tile product of 16 cycles for 16 rows x 32 values x 16 columns.
#pragma once

#include "device/cpu/tiles.hpp"
#include "ops/cpu/attention_tile.hpp"

namespace llaisys::LLAISYS_CPU_NS {

constexpr int64_t kPairStep = 16; // pairs of a product

// Division of rows into tiles, like VectorRows. Tiles are configured while an object exists.
class RowTiles {
public:
    RowTiles() { begin(kTileHeight); }
    RowTiles(const RowTiles &) = delete;
    RowTiles &operator=(const RowTiles &) = delete;
    ~RowTiles() { PairTiles::release(); }

    // Two tiles high where possible: both use each tile of keys or values that is loaded.
    static int64_t height(int64_t rows) {
        return rows >= 2 * kTileHeight ? 2 * kTileHeight : smaller(rows, kTileHeight);
    }
    // Before the products of `rows` rows. Configuring takes as long as some tile products.
    void begin(int64_t rows) {
        rows = smaller(rows, kTileHeight);
        if (rows != rows_) {
            const int n = int(rows);
            PairTiles::configure({{n, n, n, n, n, 16, 16, 16}, {64, 64, 64, 64, 64, 64, 64, 64}});
            rows_ = rows;
        }
    }

    // A product whose result is not used. Without one for about 300 ns the unit is switched off, and
    // the next one takes 300 ns.
    static void keep_awake() { PairTiles::template dot_bf16<0, 4, 5>(); }

private:
    int64_t rows_ = 0;
};

// Prefetch steps of dot_pair_rows.
inline int64_t dot_steps(int64_t columns, int64_t pairs) {
    return (columns + 2 * kPanel - 1) / (2 * kPanel) * (pairs / kPairStep);
}

// acc [n, 32 or 64] (+)= `pairs` pairs of x times those of w, as in dot_pair_rows.
template <Start start, bool is_wide, typename Fetch>
void dot_tiles(const char *x, int64_t x_row, const char *w, int64_t w_pair, int64_t pairs,
               float *acc, int64_t acc_row, Fetch &fetch) {
    if constexpr (start == Start::zero) {
        PairTiles::template zero<0>();
        PairTiles::template zero<1>();
        if constexpr (is_wide) {
            PairTiles::template zero<2>();
            PairTiles::template zero<3>();
        }
    } else {
        PairTiles::template load<0>(acc, acc_row);
        PairTiles::template load<1>(acc + 16, acc_row);
        if constexpr (is_wide) {
            PairTiles::template load<2>(acc + 32, acc_row);
            PairTiles::template load<3>(acc + 48, acc_row);
        }
    }
    for (int64_t i = 0; i < pairs; i += kPairStep, x += 64, w += kPairStep * w_pair) {
        fetch.step();
        PairTiles::template load<4>(x, x_row);
        PairTiles::template load<5>(w, w_pair);
        PairTiles::template dot_bf16<0, 4, 5>();
        PairTiles::template load<6>(w + 64, w_pair);
        PairTiles::template dot_bf16<1, 4, 6>();
        if constexpr (is_wide) {
            PairTiles::template load<7>(w + 128, w_pair);
            PairTiles::template dot_bf16<2, 4, 7>();
            PairTiles::template load<5>(w + 192, w_pair);
            PairTiles::template dot_bf16<3, 4, 5>();
        }
    }
    PairTiles::template store<0>(acc, acc_row);
    PairTiles::template store<1>(acc + 16, acc_row);
    if constexpr (is_wide) {
        PairTiles::template store<2>(acc + 32, acc_row);
        PairTiles::template store<3>(acc + 48, acc_row);
    }
}

// acc [32, 32] (+)= `pairs` pairs of x times those of w, as in dot_pair_rows.
template <Start start, typename Fetch>
void dot_high_tiles(const char *x, int64_t x_row, const char *w, int64_t w_pair, int64_t pairs,
                    float *acc, int64_t acc_row, Fetch &fetch) {
    float *lower = acc + kTileHeight * acc_row / int64_t(sizeof(float));
    if constexpr (start == Start::zero) {
        PairTiles::template zero<0>();
        PairTiles::template zero<1>();
        PairTiles::template zero<2>();
        PairTiles::template zero<3>();
    } else {
        PairTiles::template load<0>(acc, acc_row);
        PairTiles::template load<1>(acc + 16, acc_row);
        PairTiles::template load<2>(lower, acc_row);
        PairTiles::template load<3>(lower + 16, acc_row);
    }
    for (int64_t i = 0; i < pairs; i += kPairStep, x += 64, w += kPairStep * w_pair) {
        fetch.step();
        PairTiles::template load<4>(x, x_row);
        PairTiles::template load<6>(w, w_pair);
        PairTiles::template dot_bf16<0, 4, 6>();
        PairTiles::template load<7>(w + 64, w_pair);
        PairTiles::template dot_bf16<1, 4, 7>();
        PairTiles::template load<5>(x + kTileHeight * x_row, x_row);
        PairTiles::template dot_bf16<2, 5, 6>();
        PairTiles::template dot_bf16<3, 5, 7>();
    }
    PairTiles::template store<0>(acc, acc_row);
    PairTiles::template store<1>(acc + 16, acc_row);
    PairTiles::template store<2>(lower, acc_row);
    PairTiles::template store<3>(lower + 16, acc_row);
}

// acc [n, columns] (+)= `pairs` pairs of x times those of w, for the rows begun with, whole steps of
// pairs and panels of columns. Rows of acc are lda apart. x_row: the distance of rows of x; 0:
// from.x_row.
template <Start start, int x_row>
void dot_pair_rows(int64_t n, const PairOperands &from, int64_t pairs, float *acc, int64_t lda,
                   int64_t columns, TileFetch &fetch) {
    const int64_t stride = x_row != 0 ? x_row : from.x_row;
    const int64_t acc_row = lda * int64_t(sizeof(float));
    int64_t c = 0;
    for (; n > kTileHeight && c < columns; c += kPanel) {
        dot_high_tiles<start>(from.x, stride, from.w + 4 * c, from.w_pair, pairs, acc + c, acc_row,
                              fetch);
    }
    for (; c + 2 * kPanel <= columns; c += 2 * kPanel) {
        dot_tiles<start, true>(from.x, stride, from.w + 4 * c, from.w_pair, pairs, acc + c, acc_row,
                               fetch);
    }
    if (c < columns) {
        dot_tiles<start, false>(from.x, stride, from.w + 4 * c, from.w_pair, pairs, acc + c,
                                acc_row, fetch);
    }
}

} // namespace llaisys::LLAISYS_CPU_NS
