// Register tiles of dot products of pairs of bf16 (VDPBF16PS): some rows of x times 32 columns. A
// column is one lane that adds pair after pair, so results do not depend on the height of the tile.
// Included after simd_avx512.hpp by files that are compiled for AVX-512 BF16.
#pragma once

#include "ops/cpu/dot_tile.hpp"

namespace llaisys::LLAISYS_CPU_NS {

struct PairDot {
    using Vector = vf;
    static vf dot(vf sums, __m512i w, __m512i x) {
        return _mm512_dpbf16_ps(sums, __m512bh(w), __m512bh(x));
    }
};

// Where the operands of a tile lie: rows of x and pairs of columns at these distances in bytes.
struct PairOperands {
    const char *x;
    int64_t x_row;
    const char *w;
    int64_t w_pair;
};

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

// The same for n <= kMaxTileRows rows. x_row: the distance of rows of x; 0: from.x_row.
template <Start start, int x_row, int rows = kMaxTileRows, typename Fetch>
inline void dot_pair_rows(int64_t n, const PairOperands &from, int64_t pairs, float *acc,
                          int64_t lda, Fetch fetch) {
    if constexpr (rows > 1) {
        if (n < rows) {
            return dot_pair_rows<start, x_row, rows - 1>(n, from, pairs, acc, lda, fetch);
        }
    }
    dot_pairs<rows, start, x_row>(from, pairs, acc, lda, fetch);
}

} // namespace llaisys::LLAISYS_CPU_NS
