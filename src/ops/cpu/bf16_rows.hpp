// Rows of activations as bf16, for every kernel of ops/cpu/bf16_kernels.hpp. Included after
// simd_<isa>.hpp; compiled per instruction set.
#pragma once

#include "ops/cpu/bf16_kernels.hpp"
#include "ops/cpu/row_kernels.hpp"

namespace llaisys::LLAISYS_CPU_NS {

using ops::cpu::kTileK;
using ops::cpu::TileRows;

// Values [i, i + kLanes) of n, zero from n on.
inline vf load_padded(const float *values, int64_t i, int64_t n) {
    return n - i >= kLanes ? load(values + i) : n - i > 0 ? load_up_to(values + i, n - i) : zero();
}

// values [n] as bf16 into row number `row` of x, zero from n on.
inline void place_row(const TileRows &x, int64_t row, const float *values, int64_t n) {
    bf16_t *to = x.tile(row, 0) + row % 16 * kTileK;
    for (int64_t k = 0; k < x.k; k += kTileK, to += x.height * kTileK) {
        for (int64_t i = 0; i < kTileK; i += kLanes) {
            store(to + i, load_padded(values, k + i, n));
        }
    }
}

} // namespace llaisys::LLAISYS_CPU_NS
