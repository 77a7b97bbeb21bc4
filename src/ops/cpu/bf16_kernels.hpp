// Linear with bf16 weights where the machine multiplies bf16: tile registers (device::has_amx) or dot
// products of pairs (AVX-512 BF16). A separate layout, selected when a weight is packed. Activations
// are rounded to bf16. Kernels take plain pointers.
//
// A weight is strips [outputs / strip][in / 2][strip][2] of Bf16Kernels::strip outputs: for each of
// them two adjacent values along k. Outputs are padded with zeros to a multiple of 32, `in` to a
// multiple of kTileK.
#pragma once

#include "ops/cpu/kernels.hpp"

namespace llaisys::ops::cpu {

constexpr int64_t kTileK = 32;         // values of k per tile product
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

struct Bf16Kernels {
    // values [n] rounded to bf16 into row `row` of x.
    void (*place_row)(const TileRows &x, int64_t row, const float *values, int64_t n);
    void (*linear)(const TileTask &task);
    int64_t strip; // outputs of a strip of a weight: 16 or 32
};

// Null where the machine has no such products, or where they are disabled.
const Bf16Kernels *bf16_kernels();

// For tests: use the dot product of pairs of bf16 where the machine has it, even if it is slower than
// f32, or do not.
void use_bf16_dot(bool used);

} // namespace llaisys::ops::cpu
