// Rows of activations as bf16 in the layout of ops/cpu/strip_kernels.hpp. Included after
// simd_<isa>.hpp; compiled per instruction set.
#pragma once

#include "ops/cpu/linear_kernel.hpp"
#include "ops/cpu/strip_kernels.hpp"

namespace llaisys::LLAISYS_CPU_NS {

using ops::cpu::kTaskPanels;
using ops::cpu::kTileRowBytes;
using ops::cpu::kUnitBytes;
using ops::cpu::TileRows;
using ops::cpu::TileTask;

// Values [i, i + kLanes) of n, zero from n on.
inline vf load_padded(const float *values, int64_t i, int64_t n) {
    return n - i >= kLanes ? load(values + i) : n - i > 0 ? load_up_to(values + i, n - i) : zero();
}

// values [n] as bf16 into row number `row` of x, zero from n on.
inline void place_row(const TileRows &x, int64_t row, const float *values, int64_t n) {
    constexpr int64_t kValues = kTileRowBytes / int64_t(sizeof(bf16_t));
    char *to = x.tile(row, 0) + row % 16 * kTileRowBytes;
    for (int64_t k = 0; k * int64_t(sizeof(bf16_t)) < x.bytes; k += kValues) {
        for (int64_t i = 0; i < kValues; i += kLanes) {
            store(reinterpret_cast<bf16_t *>(to) + i, load_padded(values, k + i, n));
        }
        to += x.height * kTileRowBytes;
    }
}

// The type of products, for the loops of strip_tiles.hpp and strip_vectors.hpp.
struct Bf16Products {
    using Sum = float;
    template <typename Tiles, int c, int a, int b> static void dot_tiles() {
        Tiles::template dot_bf16<c, a, b>();
    }
    // Panel p of the task; acc [m, 32].
    static void finish(const TileTask &task, int64_t p, const float *acc) {
        finish_panel(task.out, p, FloatSums{acc});
    }
};

} // namespace llaisys::LLAISYS_CPU_NS
