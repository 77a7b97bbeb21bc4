// Register tiles of dot products of pairs of bf16 (VDPBF16PS): some rows of x times 32 columns. A
// column is one lane that adds pair after pair, so results do not depend on the height of the tile.
// Included after simd_avx512.hpp by files that are compiled for AVX-512 BF16.
#pragma once

#include "ops/cpu/tile.hpp"

namespace llaisys::LLAISYS_CPU_NS {

inline __m512bh pairs_at(const char *p) { return __m512bh(_mm512_loadu_si512(p)); }

// low and high[r] += the pair at `x` of each row r times those of the 32 columns at w. Rows of x are
// `stride` bytes apart.
template <int rows>
inline __attribute__((always_inline)) void add_pair(vf (&low)[rows], vf (&high)[rows],
                                                    const char *x, int64_t stride, const char *w) {
    const __m512bh first = pairs_at(w);
    const __m512bh second = pairs_at(w + 64);
#pragma GCC unroll 16
    for (int r = 0; r < rows; ++r) {
        int32_t pair;
        __builtin_memcpy(&pair, x + r * stride, sizeof pair);
        const __m512bh both = __m512bh(_mm512_set1_epi32(pair));
        low[r] = _mm512_dpbf16_ps(low[r], first, both);
        high[r] = _mm512_dpbf16_ps(high[r], second, both);
    }
}

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
        add_pair(low, high, x, stride, w);
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
