// Rows of activations as bytes in the layout of ops/cpu/strip_kernels.hpp, for weights in i8_channel.
// Included after simd_<isa>.hpp and bytes_<isa>.hpp; compiled per instruction set.
#pragma once

#include "device/cpu/simd.hpp"
#include "ops/cpu/strip_rows.hpp"

namespace llaisys::LLAISYS_CPU_NS {

// values [n] as bytes with one scale into row number `row` of x, zero from n on.
inline void place_byte_row(const TileRows &x, int64_t row, const float *values, int64_t n) {
    constexpr int kVectors = int(kTileRowBytes) / kLanes; // of a row of a tile
    const ByteScale scale = byte_scale(values, n);
    const vf factor = set1(scale.factor);
    vf sums[kVectors]; // exact: below 2^24
    for (vf &sum : sums) {
        sum = zero();
    }
    auto *to = reinterpret_cast<int8_t *>(x.tile(row, 0) + row % 16 * kTileRowBytes);
    const int64_t end = scale.is_finite() ? n : 0;
    for (int64_t k = 0; k < x.bytes; k += kTileRowBytes, to += x.height * kTileRowBytes) {
        const bool is_whole = k + kTileRowBytes <= end;
#pragma GCC unroll 16
        for (int v = 0; v < kVectors; ++v) {
            const int64_t i = k + v * kLanes;
            const vf q = mul(is_whole ? load(values + i) : load_padded(values, i, end), factor);
            store(to + v * kLanes, q);
            sums[v] = add(sums[v], to_float(round_to_int(q)));
        }
    }
    for (int v = 1; v < kVectors; ++v) {
        sums[0] = add(sums[0], sums[v]);
    }
    x.scales[row] = {scale.scale, 128 * int32_t(reduce_add(sums[0]))};
}

// Sums of products of bytes as results.
struct ByteSums {
    const int32_t *acc; // [m, 32]
    const ops::cpu::RowScale *rows;
    const float *scales; // of the columns

    vf at(int64_t r, int64_t c) const {
        vi sum;
        std::memcpy(&sum, acc + r * kPanel + c, sizeof sum);
        const vf value = to_float(sub(sum, broadcast_int(&rows[r].excess)));
        return mul(mul(value, set1(rows[r].scale)), load(scales + c));
    }
};

struct ByteProducts {
    using Sum = int32_t;
    template <typename Tiles, int c, int a, int b> static void dot_tiles() {
        Tiles::template dot_signed_unsigned<c, a, b>();
    }
    static void finish(const TileTask &task, int64_t p, const int32_t *acc) {
        finish_panel(task.out, p, ByteSums{acc, task.x.scales, task.scales + p * kPanel});
    }
};

} // namespace llaisys::LLAISYS_CPU_NS
