// Products with quantised weights: one table of functions per instruction set for bytes. A kernel
// knows plain pointers only, like those of kernels.hpp.
//
// Activations are quantised on the fly, 32 values at a time: x = scale * q, |q| <= 127. Products of
// bytes are summed exactly over a group and then added up in f32 along k, group by group, so that a
// row has the same bits at any number of rows.
#pragma once

#include "ops/cpu/kernels.hpp"
#include "ops/cpu/quant_panels.hpp"

namespace llaisys::ops::cpu {

// What a product wants to know of 32 values of a row beside their bytes.
struct QuantGroup {
    float scale;
    float minus;   // -(the sum of all 32 q)
    int32_t first; // the sum of the first 16 q
    int32_t rest;  // that of the others
    // What a sum begins with where weights are counted from 8 or 128: -8 * total, -128 * total, in the
    // way that the kernels keep sums.
    int32_t less_8, less_128;
};

// Quantised rows, in blocks of kRowBlock; k is a multiple of 32. In a block rows are side by side in
// every group, so that those of a register tile lie at distances which the compiler knows and are one
// stream along k. No tile reaches from one block into the next.
constexpr int64_t kRowBlock = 16;
struct QuantRows {
    int8_t *q;          // [rows / 16, k / 32, height, 32]
    QuantGroup *groups; // [rows / 16, k / 32, height]
    int64_t height;     // of a block: 16, or all rows where there are fewer
    int64_t k;

    // Where a group of a row is, in groups.
    int64_t at(int64_t row, int64_t group) const {
        return (row / kRowBlock * (k / kQuantGroup) + group) * height + row % kRowBlock;
    }
    // From a row on that is a multiple of kRowBlock.
    QuantRows from(int64_t row) const {
        return {q + at(row, 0) * kQuantGroup, groups + at(row, 0), height, k};
    }
};

// out[i, j] = sum over k of x[i, k] * w[j, k] + bias[j], for whole panels. `out` gives n, bias and
// where the results go; its x, w and k are not looked at.
struct QuantTask {
    QuantRows x; // out.m of them are taken
    const std::byte *w;
    LinearTask out;
};

struct QuantKernels {
    const char *name;
    int byte_offset; // what is added to a signed weight byte of the 8-bit layout: 0 or 128

    // Row `row` of `out` from k values; with NaN or infinity among them its first scale is NaN.
    void (*quantise)(const QuantRows &out, int64_t row, const float *x);

    using Product = void (*)(const QuantTask &task);
    Product q8_0, q4_0, q4_1, q5_0, q5_1, q4_k, q5_k, q6_k, q2_k, q3_k;
    Product i4_g32, i4_g128, i8_g32, i8_g128;

    Product of(DType dtype) const; // throws for a dtype that is not quantised
};

// The table that goes with kernels(): the best that this machine has within its instruction set.
const QuantKernels &quant_kernels();
const QuantKernels *quant_kernels_of(device::Isa isa);

} // namespace llaisys::ops::cpu
