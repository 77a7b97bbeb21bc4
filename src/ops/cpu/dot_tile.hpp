// Step of a register tile of dot products of 4-byte units, two bf16 or four bytes: some rows of x times
// 32 columns. A column is one lane that adds unit after unit, so results do not depend on the height
// of the tile. Included after simd_avx512.hpp.
#pragma once

#include "ops/cpu/tile.hpp"

namespace llaisys::LLAISYS_CPU_NS {

// low and high[r] += the unit at `x` of each row r times those of the 32 columns at w. Rows of x are
// `stride` bytes apart. Dot::dot(sums, w, x) adds the products of 16 units.
template <typename Dot, int rows>
inline __attribute__((always_inline)) void add_unit(typename Dot::Vector (&low)[rows],
                                                    typename Dot::Vector (&high)[rows],
                                                    const char *x, int64_t stride, const char *w) {
    const __m512i first = _mm512_loadu_si512(w);
    const __m512i second = _mm512_loadu_si512(w + 64);
#pragma GCC unroll 16
    for (int r = 0; r < rows; ++r) {
        int32_t unit;
        __builtin_memcpy(&unit, x + r * stride, sizeof unit);
        const __m512i both = _mm512_set1_epi32(unit);
        low[r] = Dot::dot(low[r], first, both);
        high[r] = Dot::dot(high[r], second, both);
    }
}

} // namespace llaisys::LLAISYS_CPU_NS
