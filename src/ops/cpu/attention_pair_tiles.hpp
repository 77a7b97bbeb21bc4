// Products of pairs of bf16 in tile registers. Included after simd_<isa>.hpp and the definition of
// PairTiles (device/cpu/tiles.hpp); compiled per instruction set.
//
// Bound: a tile product of 16 cycles for 16 rows x 32 values x 16 columns, which occupies one of the two
// ports of vectors of 512 bits: products and softmax do not overlap.
#pragma once

#include "device/cpu/tiles.hpp"
#include "ops/cpu/attention_tile.hpp"

namespace llaisys::LLAISYS_CPU_NS {

constexpr int64_t kPairStep = 16; // pairs of a tile product

// Prefetch steps of a product of n rows.
inline int64_t dot_steps(int64_t, int64_t columns, int64_t pairs) {
    return columns / kPanel * (pairs / kPairStep);
}

// Division of rows into tiles, like VectorRows, and their products. Tiles are configured while an object
// exists.
class RowTiles {
public:
    explicit RowTiles(int64_t rows) { begin(rows); }
    RowTiles(const RowTiles &) = delete;
    RowTiles &operator=(const RowTiles &) = delete;
    ~RowTiles() { PairTiles::release(); }

    // Two tiles high where possible: both use each tile of keys or values that is loaded.
    static int64_t height(int64_t rows) {
        return rows >= 2 * kTileHeight ? 2 * kTileHeight : smaller(rows, kTileHeight);
    }

    // A product of at most two row tiles, whole steps of pairs and whole panels of columns.
    void multiply(const PairProduct &product, TileFetch &fetch) {
        begin(product.rows);
        for (int64_t c = 0; c < product.columns; c += kPanel) {
            product.rows > kTileHeight ? multiply_panel<true>(product, c, fetch)
                                       : multiply_panel<false>(product, c, fetch);
        }
    }

    // A product whose result is not used. Without one for about 300 ns the unit is switched off, and
    // the next one takes 300 ns; more often, they delay the vectors.
    static void keep_awake() { PairTiles::template dot_bf16<0, 4, 5>(); }

    // Up to this many rows of a task, dot_entries computes the scores.
    static constexpr int64_t kEntryRows = kTileHeight;

    // out [kTile, 16] = keys [kTile, pairs] times queries [pairs, rows], whose rows are q_row bytes apart.
    void dot_entries(int64_t rows, const char *keys, const char *q, int64_t q_row, int64_t pairs,
                     float *out, TileFetch &fetch) {
        constexpr int64_t kOutRow = kTileHeight * int64_t(sizeof(float));
        const int64_t key_row = pairs * 4;
        begin(rows);
        for (int64_t e = 0; e < kTile; e += 2 * kTileHeight, out += 2 * kTileHeight * kTileHeight) {
            const char *low = keys + e * key_row;
            const char *high = low + kTileHeight * key_row;
            PairTiles::template zero<2>();
            PairTiles::template zero<3>();
            for (int64_t i = 0; i < pairs; i += kPairStep) {
                fetch.step();
                PairTiles::template load<7>(q + i * q_row, q_row);
                PairTiles::template load<5>(low + i * 4, key_row);
                PairTiles::template dot_bf16<2, 5, 7>();
                PairTiles::template load<6>(high + i * 4, key_row);
                PairTiles::template dot_bf16<3, 6, 7>();
            }
            PairTiles::template store<2>(out, kOutRow);
            PairTiles::template store<3>(out + kTileHeight * kTileHeight, kOutRow);
        }
    }

private:
    // Configuring takes as long as some tile products. Tiles 0 to 4 and 7 have `rows` rows or, with two
    // row tiles, 16; in dot_entries 2, 3 and 7 have one column for each row instead. The others are 16
    // rows of 64 bytes.
    void begin(int64_t rows) {
        rows = smaller(rows, kTileHeight);
        if (rows != rows_) {
            const int n = int(rows);
            PairTiles::configure(
                {{n, n, 16, 16, n, 16, 16, 16}, {64, 64, 4 * n, 4 * n, 64, 64, 64, 4 * n}});
            rows_ = rows;
        }
    }

    // One or two row tiles x a panel of columns.
    template <bool is_high>
    static void multiply_panel(const PairProduct &product, int64_t column, TileFetch &fetch) {
        const int64_t acc_row = product.lda * int64_t(sizeof(float));
        float *acc = product.acc + column;
        const char *x = product.x;
        const char *w = product.w + column * 4;
        product.is_sum ? load_sums<is_high>(acc, acc_row) : zero_sums<is_high>();
        for (int64_t i = 0; i < product.pairs; i += kPairStep) {
            fetch.step();
            PairTiles::template load<4>(x, product.x_row);
            PairTiles::template load<5>(w, product.w_pair);
            PairTiles::template dot_bf16<0, 4, 5>();
            PairTiles::template load<6>(w + 64, product.w_pair);
            PairTiles::template dot_bf16<1, 4, 6>();
            if constexpr (is_high) {
                PairTiles::template load<7>(x + kTileHeight * product.x_row, product.x_row);
                PairTiles::template dot_bf16<2, 7, 5>();
                PairTiles::template dot_bf16<3, 7, 6>();
            }
            x += kPairStep * 4;
            w += kPairStep * product.w_pair;
        }
        store_sums<is_high>(acc, acc_row);
    }

    // Tiles 0 and 1: sums of two adjacent tiles of columns; 2 and 3: those of the second row tile.
    template <bool is_high> static void zero_sums() {
        PairTiles::template zero<0>();
        PairTiles::template zero<1>();
        if constexpr (is_high) {
            PairTiles::template zero<2>();
            PairTiles::template zero<3>();
        }
    }
    template <bool is_high> static void load_sums(const float *acc, int64_t row) {
        PairTiles::template load<0>(acc, row);
        PairTiles::template load<1>(acc + 16, row);
        if constexpr (is_high) {
            acc += kTileHeight * row / int64_t(sizeof(float));
            PairTiles::template load<2>(acc, row);
            PairTiles::template load<3>(acc + 16, row);
        }
    }
    template <bool is_high> static void store_sums(float *acc, int64_t row) {
        PairTiles::template store<0>(acc, row);
        PairTiles::template store<1>(acc + 16, row);
        if constexpr (is_high) {
            acc += kTileHeight * row / int64_t(sizeof(float));
            PairTiles::template store<2>(acc, row);
            PairTiles::template store<3>(acc + 16, row);
        }
    }

    int64_t rows_ = 0; // configured
};

} // namespace llaisys::LLAISYS_CPU_NS
