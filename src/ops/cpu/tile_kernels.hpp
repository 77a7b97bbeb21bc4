// Linear with bf16 weights in tile registers, where the machine has them (device::has_amx): a
// separate layout, selected when a weight is packed. Activations are rounded to bf16. Kernels take
// plain pointers.
//
// A weight is strips [2 * ceil(out / 32)][in / 2][16][2]: for the 16 outputs of a strip two
// adjacent values along k, `in` padded with zeros to a multiple of kTileK. Outputs past the last
// one are zero.
#pragma once

#include "ops/cpu/kernels.hpp"

namespace llaisys::ops::cpu {

constexpr int64_t kTileK = 32;         // values of k per tile product
constexpr int64_t kStrip = 16;         // outputs per tile product
constexpr int64_t kTileTaskRows = 128; // largest number of rows of a TileTask
constexpr int64_t kTaskPanels = 6;     // largest number of panels of a task with more than 32 rows

// Rows of x in bf16, in tiles: [rows / 16][k / 32][16][32], k padded with zeros to a multiple of
// 32, rows padded with undefined values to a multiple of 16. Fewer than 16 rows are one tile of
// that height.
struct TileRows {
    bf16_t *q;
    int64_t height; // of a tile
    int64_t k;

    int64_t row_block() const { return height * k; } // values
    // The tile that holds this row and column.
    bf16_t *tile(int64_t row, int64_t column) const {
        return q + row / 16 * row_block() + column / kTileK * height * kTileK;
    }
    // Rows from a multiple of 16 on.
    TileRows from(int64_t row) const { return {tile(row, 0), height, k}; }
};

// `out` provides everything except the rows: its x is not used.
struct TileTask {
    TileRows x;
    LinearTask out;
};

struct TileKernels {
    // values [n] rounded to bf16 into row `row` of x.
    void (*place_row)(const TileRows &x, int64_t row, const float *values, int64_t n);
    void (*linear)(const TileTask &task);
};

// Null where there are no tiles, or where they are disabled.
const TileKernels *tile_kernels();

} // namespace llaisys::ops::cpu
