// Products of pairs of bf16 by dot products (VDPBF16PS), a pair of columns to a lane. Included after
// simd_avx512.hpp; compiled for AVX-512 BF16.
#pragma once

#include "ops/cpu/attention_tile.hpp"
#include "ops/cpu/pair_dot.hpp"

namespace llaisys::LLAISYS_CPU_NS {

constexpr int64_t kPairStep = 1; // pairs of a product

using RowTiles = VectorRows;

// Prefetch steps of dot_pair_rows.
inline int64_t dot_steps(int64_t columns, int64_t pairs) { return columns / kPanel * (pairs / 4); }

// acc [rows, 32] (+)= `pairs` pairs of x times those of w. Rows of acc are lda apart.
template <int rows, Start start, int x_row, typename Fetch>
void dot_pairs(const PairOperands &from, int64_t pairs, float *acc, int64_t lda, Fetch fetch) {
    vf low[rows];
    vf high[rows];
#pragma GCC unroll 16
    for (int r = 0; r < rows; ++r) {
        low[r] = start == Start::zero ? zero() : load(acc + r * lda);
        high[r] = start == Start::zero ? zero() : load(acc + r * lda + 16);
    }
    const int64_t stride = x_row != 0 ? x_row : from.x_row;
    const char *x = from.x;
    const char *w = from.w;
    for (int64_t i = 0; i < pairs; ++i, x += 4, w += from.w_pair) {
        if (i % 4 == 0) {
            fetch.step();
        }
        add_unit<PairDot>(low, high, x, stride, w);
    }
#pragma GCC unroll 16
    for (int r = 0; r < rows; ++r) {
        store(acc + r * lda, low[r]);
        store(acc + r * lda + 16, high[r]);
    }
}

// acc [n, columns] (+)= `pairs` pairs of x times those of w, for n <= kMaxTileRows rows and whole panels
// of columns. Rows of acc are lda apart. x_row: the distance of rows of x; 0: from.x_row.
template <Start start, int x_row, int rows = kMaxTileRows>
inline void dot_pair_rows(int64_t n, const PairOperands &from, int64_t pairs, float *acc,
                          int64_t lda, int64_t columns, TileFetch &fetch) {
    if constexpr (rows > 1) {
        if (n < rows) {
            return dot_pair_rows<start, x_row, rows - 1>(n, from, pairs, acc, lda, columns, fetch);
        }
    }
    for (int64_t c = 0; c < columns; c += kPanel) {
        dot_pairs<rows, start, x_row>({from.x, from.x_row, from.w + 4 * c, from.w_pair}, pairs,
                                      acc + c, lda, SharedFetch{&fetch});
    }
}

} // namespace llaisys::LLAISYS_CPU_NS
