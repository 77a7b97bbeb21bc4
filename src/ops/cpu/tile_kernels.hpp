// Products with bf16 weights over tile registers, where the machine has them (device::has_amx): a
// layout of its own, chosen when a weight is laid out. Activations are rounded to bf16. Kernels know
// plain pointers only.
//
// A weight is strips [2 * ceil(out / 32)][in / 2][16][2]: of the 16 outputs of a strip two values along k
// side by side, `in` padded with zeros to a multiple of kTileK. Outputs past the last one are zero.
#pragma once

#include "ops/cpu/kernels.hpp"

namespace llaisys::ops::cpu {

constexpr int64_t kTileK = 32;         // values of k that one tile product takes
constexpr int64_t kStrip = 16;         // outputs of one
constexpr int64_t kTileTaskRows = 128; // of one TileTask at most
constexpr int64_t kTaskPanels = 6;     // of 32 outputs, of one with more than 32 rows at most

// Rows of x in bf16, in tiles: [rows / 16][k / 32][16][32], k padded with zeros to a multiple of 32,
// rows with anything to one of 16. Fewer than 16 rows are one tile of that height.
struct TileRows {
    bf16_t *q;
    int64_t height; // of a tile
    int64_t k;

    int64_t row_block() const { return height * k; } // values
    // The tile that holds this row and column.
    bf16_t *tile(int64_t row, int64_t column) const {
        return q + row / 16 * row_block() + column / kTileK * height * kTileK;
    }
    // From a row on that is a multiple of 16.
    TileRows from(int64_t row) const { return {tile(row, 0), height, k}; }
};

// `out` gives all but the rows: its x is not looked at.
struct TileTask {
    TileRows x;
    LinearTask out;
};

struct TileKernels {
    // values [n] rounded to bf16 into row number `row` of x.
    void (*place_row)(const TileRows &x, int64_t row, const float *values, int64_t n);
    void (*linear)(const TileTask &task);
};

// Null where there are no tiles, or where they are not used.
const TileKernels *tile_kernels();

} // namespace llaisys::ops::cpu
