// What the byte vectors of AVX-512 share with and without VNNI: sixteen lanes of four bytes. See
// bytes.hpp for the names.
#pragma once

#include "device/cpu/bytes.hpp"

#include <cstddef>
#include <immintrin.h>

namespace llaisys::LLAISYS_CPU_NS {

typedef __m512i vb;

inline vb load_bytes(const std::byte *p) { return _mm512_loadu_si512(p); }
inline void store_bytes(std::byte *p, vb a) { _mm512_storeu_si512(p, a); }
inline vb bytes_of(vf a) { return _mm512_castps_si512(a); }
inline vb low_nibbles(vb a) { return _mm512_and_si512(a, _mm512_set1_epi8(15)); }
inline vb high_nibbles(vb a) { return low_nibbles(_mm512_srli_epi16(a, 4)); }
template <int shift, int mask> vb with_bits(vb a, vb plane) {
    if constexpr (shift > 0) {
        plane = _mm512_slli_epi16(plane, shift);
    } else if constexpr (shift < 0) {
        plane = _mm512_srli_epi16(plane, -shift);
    }
    constexpr int kTakeSecondWhereThird = 0xca; // of (mask, plane, a)
    return _mm512_ternarylogic_epi64(_mm512_set1_epi8(mask), plane, a, kTakeSecondWhereThird);
}
template <int n> vb sub_bytes(vb a) { return _mm512_sub_epi8(a, _mm512_set1_epi8(n)); }

struct ByteGroup {
    const int8_t *x;
};
inline ByteGroup load_group(const int8_t *x) { return {x}; }
template <int c> __m512i broadcast_quad(const ByteGroup &x) {
    int32_t bits;
    __builtin_memcpy(&bits, x.x + 4 * c, sizeof bits);
    return _mm512_set1_epi32(bits);
}

// A sum is stored as the bits of 1.5 * 2^23 + sum, which a fused multiply-add can scale directly.
constexpr int32_t kSumStart = 0x4b400000;
constexpr float kSumBase = 0x1.8p23f;
inline vi start_sum(int32_t value) { // modulo 2^32
    return _mm512_set1_epi32(int32_t(uint32_t(kSumStart) + uint32_t(value)));
}
inline vf sum_of(vi sum) { return sub(float_of_bits(sum), set1(kSumBase)); }
inline vi broadcast_int(const int32_t *p) { return _mm512_set1_epi32(*p); }
template <int n> vi start_sum_less(vi total) {
    return sub(start_sum(0), _mm512_mullo_epi32(total, _mm512_set1_epi32(n)));
}

inline vf load_u8(const std::byte *p) {
    const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i *>(p));
    return _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(bytes));
}
inline vf load_i8(const std::byte *p) {
    const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i *>(p));
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(bytes));
}
inline int32_t sum_of_16(const int8_t *p) {
    const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i *>(p));
    const __m128i moved = _mm_xor_si128(bytes, _mm_set1_epi8(-128)); // + 128: unsigned bytes
    const __m128i sums = _mm_sad_epu8(moved, _mm_setzero_si128());
    return int32_t(_mm_cvtsi128_si64(sums) + _mm_extract_epi64(sums, 1)) - 16 * 128;
}
inline void store_ints(int32_t *p, vi a) { _mm512_storeu_si512(p, a); }

constexpr bool kRowsFirst = true;
constexpr int kQuantRows = 8; // sums fill half of the registers; totals stay in memory
constexpr int64_t kPackedRows = 12;
constexpr int64_t quant_height(int64_t m) { // avoids a tile of one row
    constexpr int kHeights[] = {0, 1, 2, 3, 4, 3, 6, 4, 8, 6, 6, 4, 6, 6, 6, 6};
    return m < 16 ? kHeights[m] : 8;
}
constexpr int quant_vectors(int rows, bool is_split) { return is_split && rows > 4 ? 1 : 2; }

} // namespace llaisys::LLAISYS_CPU_NS
