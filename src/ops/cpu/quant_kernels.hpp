// Linear with quantised weights: one function table per instruction set for bytes. Kernels take
// plain pointers, like those of kernels.hpp.
//
// Activations are quantised on the fly in groups of 32: x = scale * q, |q| <= 127. Byte products
// are summed exactly over a group and then accumulated in f32 along k, group by group, so that
// results are bitwise identical at any number of rows.
#pragma once

#include "ops/cpu/kernels.hpp"
#include "ops/cpu/quant_panels.hpp"

namespace llaisys::ops::cpu {

// Data of 32 values of a row beside their bytes.
struct QuantGroup {
    float scale;
    float minus;   // -(sum of all 32 q)
    int32_t first; // sum of the first 16 q
    int32_t rest;  // sum of the others
    // Start values of a sum for weights with a zero point of 8 or 128: -8 * total, -128 * total, in
    // the representation of the kernels' sums.
    int32_t less_8, less_128;
};

// Quantised rows, in blocks of kRowBlock; k is a multiple of 32. In a block the rows are adjacent
// in every group, so that those of a register tile have constant offsets and form one stream along
// k. No tile spans two blocks.
constexpr int64_t kRowBlock = 16;
struct QuantRows {
    int8_t *q;          // [rows / 16, k / 32, height, 32]
    QuantGroup *groups; // [rows / 16, k / 32, height]
    int64_t height;     // of a block: 16, or all rows where there are fewer
    int64_t k;

    // Index of a group of a row.
    int64_t at(int64_t row, int64_t group) const {
        return (row / kRowBlock * (k / kQuantGroup) + group) * height + row % kRowBlock;
    }
    // Rows from a multiple of kRowBlock on.
    QuantRows from(int64_t row) const {
        return {q + at(row, 0) * kQuantGroup, groups + at(row, 0), height, k};
    }
};

// out[i, j] = sum over k of x[i, k] * w[j, k] + bias[j], for whole panels. `out` provides n, bias
// and the destination; its x, w and k are not used.
struct QuantTask {
    QuantRows x; // the first out.m rows
    const std::byte *w;
    LinearTask out;
};

struct QuantKernels {
    int byte_offset; // added to a signed weight byte of the 8-bit layout: 0 or 128

    // Quantises k values into row `row` of `out`; if one is NaN or infinite, its first scale is
    // NaN.
    void (*quantise)(const QuantRows &out, int64_t row, const float *x);

    void (*products[kQuantFormatCount])(const QuantTask &task); // of each format
};

// The table that matches kernels(): the best of this machine within its instruction set.
const QuantKernels &quant_kernels();
const QuantKernels *quant_kernels_of(device::Isa isa);

// For tests: use or avoid instructions for the dot product of bytes (VNNI, SDOT). Weights must be
// packed again. Must not be called while an operator runs.
void allow_byte_dot(bool allowed);

} // namespace llaisys::ops::cpu
