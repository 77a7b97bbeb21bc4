// Vectors of bytes on AVX-512 without VNNI. See bytes.hpp for the names.
#pragma once

#include "device/cpu/bytes_512.hpp"

namespace llaisys::LLAISYS_CPU_NS {

constexpr bool kUnsignedWeights = false;
constexpr int kByteOffset = 0;

// Pairs of products are summed in 16 bits; |w| <= 128 and |x| <= 127 cannot overflow.
template <int c, bool is_signed> vi dot(vi acc, vb w, const ByteGroup &x) {
    __m512i quad = broadcast_quad<c>(x);
    if constexpr (is_signed) {
        quad = _mm512_mask_sub_epi8(quad, _mm512_movepi8_mask(w), _mm512_setzero_si512(), quad);
        w = _mm512_abs_epi8(w);
    }
    const __m512i pairs = _mm512_maddubs_epi16(w, quad);
    return _mm512_add_epi32(acc, _mm512_madd_epi16(pairs, _mm512_set1_epi16(1)));
}

struct vw {
    __m512i words;
};
template <int c, bool is_signed> vw dot(vw acc, vb w, const ByteGroup &x) {
    const __m512i pairs = _mm512_maddubs_epi16(w, broadcast_quad<c>(x));
    return {_mm512_add_epi16(acc.words, pairs)};
}
inline vi add_words(vi sum, vw acc) {
    return _mm512_add_epi32(sum, _mm512_madd_epi16(acc.words, _mm512_set1_epi16(1)));
}

} // namespace llaisys::LLAISYS_CPU_NS
