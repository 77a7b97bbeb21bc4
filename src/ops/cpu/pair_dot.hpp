// The dot product of pairs of bf16 (VDPBF16PS), for dot_tile.hpp. Included after simd_avx512.hpp by
// files that are compiled for AVX-512 BF16.
#pragma once

#include "ops/cpu/dot_tile.hpp"

namespace llaisys::LLAISYS_CPU_NS {

struct PairDot {
    using Vector = vf;
    static vf dot(vf sums, __m512i w, __m512i x) {
        return _mm512_dpbf16_ps(sums, __m512bh(w), __m512bh(x));
    }
};

} // namespace llaisys::LLAISYS_CPU_NS
