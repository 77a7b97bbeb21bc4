// The vector abstraction on AVX-512 F BW VL DQ: sixteen lanes. See simd.hpp for the names.
#pragma once

#include "base/dtype.hpp"
#include "device/cpu/isa.hpp"

#include <immintrin.h>

#if defined(__GNUC__) && !defined(__clang__) // GCC 12 warns about its own _mm512_undefined_ps
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif

#ifndef LLAISYS_CPU_NS
#define LLAISYS_CPU_NS cpu_avx512
#endif

namespace llaisys::LLAISYS_CPU_NS {

constexpr device::Isa kIsa = device::Isa::avx512;
constexpr int kLanes = 16;
typedef __m512 vf;
typedef __m512i vi;

inline vf set1(float value) { return _mm512_set1_ps(value); }

inline vf load(const float *p) { return _mm512_loadu_ps(p); }
inline vf load(const bf16_t *p) {
    const __m256i half = _mm256_loadu_si256(reinterpret_cast<const __m256i *>(p));
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16));
}
inline vf load(const f16_t *p) {
    return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i *>(p)));
}
inline vf load(const int8_t *p) {
    const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i *>(p));
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(bytes));
}

inline void store(float *p, vf value) { _mm512_storeu_ps(p, value); }
#ifdef __AVX512BF16__
inline void store(bf16_t *p, vf value) { // denormals become zero, as in products of bf16
    _mm256_storeu_si256(reinterpret_cast<__m256i *>(p), __m256i(_mm512_cvtneps_pbh(value)));
}
#else
inline void store(bf16_t *p, vf value) {
    const __m512i bits = _mm512_castps_si512(value);
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    const __m512i near = _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff)), odd);
    const __m512i quiet = _mm512_or_si512(bits, _mm512_set1_epi32(0x400000));
    const __mmask16 nan = _mm512_cmp_ps_mask(value, value, _CMP_UNORD_Q);
    const __m512i result = _mm512_srli_epi32(_mm512_mask_mov_epi32(near, nan, quiet), 16);
    _mm256_storeu_si256(reinterpret_cast<__m256i *>(p), _mm512_cvtepi32_epi16(result));
}
#endif
inline void store(f16_t *p, vf value) {
    _mm256_storeu_si256(reinterpret_cast<__m256i *>(p),
                        _mm512_cvtps_ph(value, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
inline void store(int8_t *p, vf value) {
    _mm_storeu_si128(reinterpret_cast<__m128i *>(p),
                     _mm512_cvtepi32_epi8(_mm512_cvtps_epi32(value)));
}

inline vf low_halves(vf pairs) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_castps_si512(pairs), 16));
}
inline vf high_halves(vf pairs) {
    return _mm512_and_ps(pairs, _mm512_castsi512_ps(_mm512_set1_epi32(int(0xffff0000u))));
}
template <int c> vf byte_of(vf quads) {
    const __m512i bytes = _mm512_slli_epi32(_mm512_castps_si512(quads), 24 - 8 * c);
    return _mm512_cvtepi32_ps(_mm512_srai_epi32(bytes, 24));
}

inline vf fma(vf a, vf b, vf c) { return _mm512_fmadd_ps(a, b, c); }
inline vf max_num(vf a, vf b) { return _mm512_max_ps(a, b); }
inline vf clamp(vf low, vf high, vf x) { return _mm512_max_ps(low, _mm512_min_ps(high, x)); }
inline bool any_greater(vf a, vf b) { return _mm512_cmp_ps_mask(a, b, _CMP_GT_OQ) != 0; }
inline bool any_equal(vf a, vf b) { return _mm512_cmp_ps_mask(a, b, _CMP_EQ_OQ) != 0; }
inline vf select_greater(vf a, vf b, vf x, vf y) {
    return _mm512_mask_blend_ps(_mm512_cmp_ps_mask(a, b, _CMP_GT_OQ), y, x);
}
inline vf keep_lanes(vf x, int64_t begin, int64_t end, vf other) {
    const vi lanes = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    const vi from_begin = _mm512_sub_epi32(lanes, _mm512_set1_epi32(int(begin)));
    const __mmask16 kept = _mm512_cmplt_epu32_mask(from_begin, _mm512_set1_epi32(int(end - begin)));
    return _mm512_mask_mov_ps(other, kept, x);
}

inline float reduce_add(vf a) { return _mm512_reduce_add_ps(a); }
inline float reduce_max(vf a) { return _mm512_reduce_max_ps(a); }

// Lane r: the maximum of a[r]. Halves, by transposing pairs of rows, what is left of each row.
inline vf reduce_max_each(const vf (&a)[kLanes]) {
    vf fours[4]; // rows [4 i, 4 i + 4), in each quarter
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
        const vf *row = a + 4 * i;
        const vf x =
            _mm512_max_ps(_mm512_unpacklo_ps(row[0], row[1]), _mm512_unpackhi_ps(row[0], row[1]));
        const vf y =
            _mm512_max_ps(_mm512_unpacklo_ps(row[2], row[3]), _mm512_unpackhi_ps(row[2], row[3]));
        fours[i] = _mm512_max_ps(_mm512_shuffle_ps(x, y, 0x44), _mm512_shuffle_ps(x, y, 0xee));
    }
    vf eights[2];
#pragma GCC unroll 2
    for (int i = 0; i < 2; ++i) {
        const vf x = fours[2 * i];
        const vf y = fours[2 * i + 1];
        eights[i] =
            _mm512_max_ps(_mm512_shuffle_f32x4(x, y, 0x88), _mm512_shuffle_f32x4(x, y, 0xdd));
    }
    return _mm512_max_ps(_mm512_shuffle_f32x4(eights[0], eights[1], 0x88),
                         _mm512_shuffle_f32x4(eights[0], eights[1], 0xdd));
}

inline vi round_to_int(vf a) { return _mm512_cvtps_epi32(a); }
inline vf to_float(vi a) { return _mm512_cvtepi32_ps(a); }
inline vi half_of(vi a) { return _mm512_srai_epi32(a, 1); }
inline vi sub(vi a, vi b) { return _mm512_sub_epi32(a, b); }
inline vf power_of_2(vi n) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_add_epi32(n, _mm512_set1_epi32(127)), 23));
}

// Four columns of load_transposed.
template <typename Rows>
inline __attribute__((always_inline)) void load_four_transposed(const Rows &rows, int64_t i,
                                                                vf *transposed) {
    vf r[4]; // columns [i, i + 4) of rows j, j + 4, j + 8 and j + 12
#pragma GCC unroll 4
    for (int j = 0; j < 4; ++j) {
        r[j] = _mm512_castps128_ps512(_mm_loadu_ps(rows.row(j) + i));
        r[j] = _mm512_insertf32x4(r[j], _mm_loadu_ps(rows.row(j + 4) + i), 1);
        r[j] = _mm512_insertf32x4(r[j], _mm_loadu_ps(rows.row(j + 8) + i), 2);
        r[j] = _mm512_insertf32x4(r[j], _mm_loadu_ps(rows.row(j + 12) + i), 3);
    }
    const vf a = _mm512_unpacklo_ps(r[0], r[1]);
    const vf b = _mm512_unpackhi_ps(r[0], r[1]);
    const vf d = _mm512_unpacklo_ps(r[2], r[3]);
    const vf e = _mm512_unpackhi_ps(r[2], r[3]);
    transposed[0] = _mm512_shuffle_ps(a, d, 0x44);
    transposed[1] = _mm512_shuffle_ps(a, d, 0xee);
    transposed[2] = _mm512_shuffle_ps(b, e, 0x44);
    transposed[3] = _mm512_shuffle_ps(b, e, 0xee);
}

template <typename Rows>
inline __attribute__((always_inline)) void load_transposed(const Rows &rows, int64_t i,
                                                           vf (&transposed)[kLanes]) {
#pragma GCC unroll 4
    for (int c = 0; c < 16; c += 4) {
        load_four_transposed(rows, i + c, transposed + c);
    }
}

constexpr int kMaxTileRows = 12;
constexpr int kTileRows = 12;
constexpr int kDirectTiles = 6;
constexpr bool broadcasts_rows(int) { return true; }
constexpr int tile_vectors(int) { return 2; }
constexpr int64_t kBlockK = 1024;
constexpr int kStreamBytes = 8192;
constexpr int kFarStreamBytes = 16384;

} // namespace llaisys::LLAISYS_CPU_NS

#include "device/cpu/simd_x86.hpp"
