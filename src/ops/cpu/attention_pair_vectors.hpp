// Products of pairs of bf16 by dot products (VDPBF16PS), a pair of columns to a lane. Included after
// simd_avx512.hpp; compiled for AVX-512 BF16.
#pragma once

#include "ops/cpu/attention_tile.hpp"
#include "ops/cpu/pair_dot.hpp"

namespace llaisys::LLAISYS_CPU_NS {

constexpr int64_t kPairStep = 1; // pairs of a product

// Prefetch steps of a product of n rows.
inline int64_t dot_steps(int64_t, int64_t columns, int64_t pairs) {
    return columns / kPanel * (pairs / 4);
}

// A panel of a product. x_row: the distance of rows of x; 0: product.x_row.
template <int rows, Start start, int x_row, typename Fetch>
void dot_pairs(const PairProduct &product, int64_t column, Fetch fetch) {
    float *acc = product.acc + column;
    const int64_t lda = product.lda;
    vf low[rows];
    vf high[rows];
#pragma GCC unroll 16
    for (int r = 0; r < rows; ++r) {
        low[r] = start == Start::zero ? zero() : load(acc + r * lda);
        high[r] = start == Start::zero ? zero() : load(acc + r * lda + 16);
    }
    const int64_t stride = x_row != 0 ? x_row : product.x_row;
    const char *x = product.x;
    const char *w = product.w + 4 * column;
    for (int64_t i = 0; i < product.pairs; ++i, x += 4, w += product.w_pair) {
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

// A product of at most kMaxTileRows rows and whole panels of columns.
template <Start start, int x_row, int rows = kMaxTileRows>
inline void dot_pair_rows(const PairProduct &product, TileFetch &fetch) {
    if constexpr (rows > 1) {
        if (product.rows < rows) {
            return dot_pair_rows<start, x_row, rows - 1>(product, fetch);
        }
    }
    for (int64_t c = 0; c < product.columns; c += kPanel) {
        dot_pairs<rows, start, x_row>(product, c, SharedFetch{&fetch});
    }
}

struct RowTiles : VectorRows {
    using VectorRows::VectorRows;

    // Sums have weights for x, other products queries.
    void multiply(const PairProduct &product, TileFetch &fetch) {
        constexpr int kFloat = int(sizeof(float));
        constexpr int kQueryBytes = int(ops::cpu::kQueryStride) * kFloat;
        if (product.is_sum) {
            dot_pair_rows<Start::sums, int(kTile) * kFloat>(product, fetch);
        } else if (product.x_row == kQueryBytes) {
            dot_pair_rows<Start::zero, kQueryBytes>(product, fetch);
        } else {
            dot_pair_rows<Start::zero, 0>(product, fetch);
        }
    }
};

} // namespace llaisys::LLAISYS_CPU_NS
