// Register tiles of dot products of pairs of bf16 (VDPBF16PS): some rows of x times 32 columns. A
// column is one lane that adds pair after pair, so results do not depend on the height of the tile.
// Included after simd_avx512.hpp by files that are compiled for AVX-512 BF16.
#pragma once

#include "ops/cpu/tile.hpp"

namespace llaisys::LLAISYS_CPU_NS {

inline __m512bh pairs_at(const char *p) { return __m512bh(_mm512_loadu_si512(p)); }

// low and high[r] += the pair at `x` of each row r times those of the 32 columns at w. Rows of x are
// `stride` bytes apart.
template <int rows>
inline __attribute__((always_inline)) void add_pair(vf (&low)[rows], vf (&high)[rows],
                                                    const char *x, int64_t stride, const char *w) {
    const __m512bh first = pairs_at(w);
    const __m512bh second = pairs_at(w + 64);
#pragma GCC unroll 16
    for (int r = 0; r < rows; ++r) {
        int32_t pair;
        __builtin_memcpy(&pair, x + r * stride, sizeof pair);
        const __m512bh both = __m512bh(_mm512_set1_epi32(pair));
        low[r] = _mm512_dpbf16_ps(low[r], first, both);
        high[r] = _mm512_dpbf16_ps(high[r], second, both);
    }
}

} // namespace llaisys::LLAISYS_CPU_NS
