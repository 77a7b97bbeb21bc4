// Tile registers: eight matrices of up to 16 rows of up to 64 bytes, and products of them. Kernels
// take a type with these static functions; tiles_amx.hpp has that of the machine, and the tests have
// one in plain C++:
//   configure(shapes): before anything else, on this thread; release(): when it is done
//   zero<t>(), load<t>(p, stride), store<t>(p, stride): rows lie `stride` bytes apart
//   dot_bytes<c, a, b>(): c (i32) += a (signed bytes) * b, where row k of b holds the values 4k..4k + 3
//   of each column, side by side; sums are exact
//   dot_bf16<c, a, b>(): c (f32) += a (bf16) * b, where row k of b holds the values 2k and 2k + 1 of each
//   column: two chains of fused products along k, of the even values and of the odd ones, from zero on;
//   their sum is added to c. Denormals count as zero. (Measured: no bit differs in a million sums.)
#pragma once

#include <cstdint>

namespace llaisys::LLAISYS_CPU_NS {

constexpr int kTiles = 8;
constexpr int64_t kTileHeight = 16;

// Of each tile; 0 rows: not used.
struct TileShapes {
    int rows[kTiles];
    int row_bytes[kTiles];
};

} // namespace llaisys::LLAISYS_CPU_NS
