// Linear with bf16 or i8_channel weights where the machine multiplies these: tile registers
// (device::has_amx) or dot products of vectors (AVX-512 BF16, VNNI). A separate layout, selected when
// a weight is packed. Kernels take plain pointers.
//
// The layout is in units of four bytes, adjacent values along k: two bf16 or four bytes. A weight is
// strips [outputs / strip][units][strip] of StripKernels::strip outputs. Outputs are padded with
// zeros to a multiple of 32, rows to a multiple of kTileRowBytes.
//
// bf16: activations are rounded to bf16.
// i8_channel: values are unsigned, q + 128, and a row of x is scale * q, |q| <= 127, with one scale
// for the whole row. Sums over k are exact integers, multiplied by both scales at the end: results
// are the same for every kernel.
#pragma once

#include "ops/cpu/kernels.hpp"

namespace llaisys::ops::cpu {

constexpr int64_t kTileRowBytes = 64; // of a row of x per tile product
constexpr int64_t kUnitBytes = 4;     // adjacent values along k
constexpr int64_t kTaskPanels = 6;    // largest number of panels of a task with more than 32 rows

struct RowScale {
    float scale;    // NaN if a value is NaN or infinite
    int32_t excess; // 128 * (sum of all q): what the 128 in the weights adds to a sum
};

// Rows of x in tiles: [rows / 16][bytes / 64][16][64], padded with zeros to a multiple of 64 bytes,
// rows padded with undefined values to a multiple of 16. Fewer than 16 rows are one tile of that
// height.
struct TileRows {
    char *q;
    int64_t height;   // of a tile
    int64_t bytes;    // of a row
    RowScale *scales; // i8_channel: of each row

    int64_t row_block() const { return height * bytes; } // bytes
    // The tile that holds this byte of a row.
    char *tile(int64_t row, int64_t byte) const {
        return q + row / 16 * row_block() + byte / kTileRowBytes * height * kTileRowBytes;
    }
    // Rows from a multiple of 16 on.
    TileRows from(int64_t row) const { return {tile(row, 0), height, bytes, scales + row}; }
};

// `out` provides everything except the rows: its x and k are not used.
struct TileTask {
    TileRows x;
    LinearTask out;
    const float *scales; // i8_channel: of each output, padded to whole panels
};

struct StripKernels {
    // values [n] in the type of the products as row number `row` of x.
    void (*place_row)(const TileRows &x, int64_t row, const float *values, int64_t n);
    void (*linear)(const TileTask &task);
    int64_t strip;     // outputs of a strip of a weight: 16 or 32
    int64_t task_rows; // largest number of rows of a task
};

// For weights of this dtype, bf16 or i8_channel; null where the machine has no such products, or
// where they are disabled (use_bf16_dot, allow_byte_dot).
const StripKernels *strip_kernels(DType dtype);

// For tests: use the dot product of pairs of bf16 where the machine has it, even if it is slower than
// f32, or do not.
void use_bf16_dot(bool used);

} // namespace llaisys::ops::cpu
