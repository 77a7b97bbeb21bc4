// Vectors of bytes on AVX2: eight lanes of four. See bytes.hpp for the names.
#pragma once

#include "device/cpu/bytes.hpp"

#include <cstddef>
#include <immintrin.h>

namespace llaisys::LLAISYS_CPU_NS {

typedef __m256i vb;
constexpr bool kUnsignedWeights = false;
constexpr int kByteOffset = 0;

inline vb load_bytes(const std::byte *p) {
    return _mm256_loadu_si256(reinterpret_cast<const __m256i *>(p));
}
inline void store_bytes(std::byte *p, vb a) {
    _mm256_storeu_si256(reinterpret_cast<__m256i *>(p), a);
}
inline vb low_nibbles(vb a) { return _mm256_and_si256(a, _mm256_set1_epi8(15)); }
inline vb high_nibbles(vb a) { return low_nibbles(_mm256_srli_epi16(a, 4)); }
template <int shift, int mask> vb with_bits(vb a, vb plane) {
    if constexpr (shift > 0) {
        plane = _mm256_slli_epi16(plane, shift);
    } else if constexpr (shift < 0) {
        plane = _mm256_srli_epi16(plane, -shift);
    }
    return _mm256_or_si256(a, _mm256_and_si256(plane, _mm256_set1_epi8(mask)));
}
template <int n> vb sub_bytes(vb a) { return _mm256_sub_epi8(a, _mm256_set1_epi8(n)); }

struct ByteGroup {
    const int8_t *x;
};
inline ByteGroup load_group(const int8_t *x) { return {x}; }

inline __m256i broadcast_quad(const int8_t *p) {
    int32_t bits;
    __builtin_memcpy(&bits, p, sizeof bits);
    return _mm256_set1_epi32(bits);
}

// Pairs of products are summed in 16 bits; |w| <= 128 and |x| <= 127 cannot overflow.
template <int c, bool is_signed> vi dot(vi acc, vb w, const ByteGroup &x) {
    __m256i quad = broadcast_quad(x.x + 4 * c);
    if constexpr (is_signed) {
        quad = _mm256_sign_epi8(quad, w);
        w = _mm256_abs_epi8(w);
    }
    const __m256i pairs = _mm256_maddubs_epi16(w, quad);
    return _mm256_add_epi32(acc, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
}

struct vw {
    __m256i words;
};
template <int c, bool is_signed> vw dot(vw acc, vb w, const ByteGroup &x) {
    const __m256i pairs = _mm256_maddubs_epi16(w, broadcast_quad(x.x + 4 * c));
    return {_mm256_add_epi16(acc.words, pairs)};
}
inline vi add_words(vi sum, vw acc) {
    return _mm256_add_epi32(sum, _mm256_madd_epi16(acc.words, _mm256_set1_epi16(1)));
}

constexpr int32_t kSumStart = 0;
constexpr float kSumBase = 0;
inline vi start_sum(int32_t value) { return _mm256_set1_epi32(value); }
inline vf sum_of(vi sum) { return to_float(sum); }
inline vi broadcast_int(const int32_t *p) { return _mm256_set1_epi32(*p); }
template <int n> vi start_sum_less(vi total) {
    return _mm256_mullo_epi32(total, _mm256_set1_epi32(-n));
}

inline vf load_u8(const std::byte *p) {
    const __m128i bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i *>(p));
    return _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(bytes));
}
inline vf load_i8(const std::byte *p) {
    const __m128i bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i *>(p));
    return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(bytes));
}
inline int32_t sum_of_16(const int8_t *p) {
    const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i *>(p));
    const __m128i moved = _mm_xor_si128(bytes, _mm_set1_epi8(-128)); // + 128: unsigned bytes
    const __m128i sums = _mm_sad_epu8(moved, _mm_setzero_si128());
    return int32_t(_mm_cvtsi128_si64(sums) + _mm_extract_epi64(sums, 1)) - 16 * 128;
}

constexpr bool kRowsFirst = false;
constexpr int kQuantRows = 2;
constexpr int64_t kPackedRows = kQuantRows;
constexpr int64_t quant_height(int64_t m) { return m < 2 ? 1 : 2; }
constexpr int quant_vectors(int rows, bool is_split) {
    return (rows == 1 ? 4 : 2) / (is_split ? 2 : 1);
}

} // namespace llaisys::LLAISYS_CPU_NS
