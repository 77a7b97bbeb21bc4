// Tile registers: eight matrices of up to 16 rows of up to 64 bytes, and their products. Kernels
// take a type with these static functions; tiles_amx.hpp implements it with AMX, the tests in plain
// C++:
//   configure(shapes): first, on each thread; release(): last
//   zero<t>(), load<t>(p, stride), store<t>(p, stride): rows are `stride` bytes apart
//   dot_bytes<c, a, b>(): c (i32) += a (signed bytes) * b, where row k of b holds the values 4k..4k + 3
//   of each column, adjacent; sums are exact modulo 2^32
//   dot_signed_unsigned<c, a, b>(): the same where the bytes of b are unsigned
//   dot_bf16<c, a, b>(): c (f32) += a (bf16) * b, where row k of b holds the values 2k and 2k + 1 of each
//   column: two chains of fused products along k, of the even and the odd values, starting from zero;
//   their sum is added to c. Denormals count as zero. (Verified bit for bit on a million sums.)
#pragma once

#include <cstdint>

namespace llaisys::LLAISYS_CPU_NS {

constexpr int kTiles = 8;
constexpr int64_t kTileHeight = 16;

// Shape of each tile; 0 rows: unused.
struct TileShapes {
    int rows[kTiles];
    int row_bytes[kTiles];
};

} // namespace llaisys::LLAISYS_CPU_NS
