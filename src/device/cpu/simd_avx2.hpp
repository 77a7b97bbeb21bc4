// The vector abstraction on AVX2 + FMA + F16C: eight lanes. See simd.hpp for the names.
#pragma once

#include "base/dtype.hpp"
#include "device/cpu/isa.hpp"

#include <immintrin.h>

#ifndef LLAISYS_CPU_NS
#define LLAISYS_CPU_NS cpu_avx2
#endif

namespace llaisys::LLAISYS_CPU_NS {

constexpr device::Isa kIsa = device::Isa::avx2;
constexpr int kLanes = 8;
typedef __m256 vf;
typedef __m256i vi;

inline vf set1(float value) { return _mm256_set1_ps(value); }

inline vf load(const float *p) { return _mm256_loadu_ps(p); }
inline vf load(const bf16_t *p) {
    const __m128i half = _mm_loadu_si128(reinterpret_cast<const __m128i *>(p));
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(half), 16));
}
inline vf load(const f16_t *p) {
    return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i *>(p)));
}
inline vf load(const int8_t *p) {
    const __m128i bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i *>(p));
    return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(bytes));
}

inline void store(float *p, vf value) { _mm256_storeu_ps(p, value); }
inline void store(bf16_t *p, vf value) {
    const __m256i bits = _mm256_castps_si256(value);
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    const __m256i near = _mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7fff)), odd);
    const __m256i quiet = _mm256_or_si256(bits, _mm256_set1_epi32(0x400000));
    const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(value, value, _CMP_UNORD_Q));
    const __m256i result = _mm256_srli_epi32(_mm256_blendv_epi8(near, quiet, nan), 16);
    const __m128i packed =
        _mm_packus_epi32(_mm256_castsi256_si128(result), _mm256_extracti128_si256(result, 1));
    _mm_storeu_si128(reinterpret_cast<__m128i *>(p), packed);
}
inline void store(f16_t *p, vf value) {
    _mm_storeu_si128(reinterpret_cast<__m128i *>(p),
                     _mm256_cvtps_ph(value, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
inline void store(int8_t *p, vf value) {
    const __m256i ints = _mm256_cvtps_epi32(value);
    const __m128i words =
        _mm_packs_epi32(_mm256_castsi256_si128(ints), _mm256_extracti128_si256(ints, 1));
    _mm_storel_epi64(reinterpret_cast<__m128i *>(p), _mm_packs_epi16(words, words));
}

inline vf low_halves(vf pairs) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_castps_si256(pairs), 16));
}
inline vf high_halves(vf pairs) {
    return _mm256_and_ps(pairs, _mm256_castsi256_ps(_mm256_set1_epi32(int(0xffff0000u))));
}
template <int c> vf byte_of(vf quads) {
    const __m256i bytes = _mm256_slli_epi32(_mm256_castps_si256(quads), 24 - 8 * c);
    return _mm256_cvtepi32_ps(_mm256_srai_epi32(bytes, 24));
}

inline vf fma(vf a, vf b, vf c) { return _mm256_fmadd_ps(a, b, c); }
inline vf max_num(vf a, vf b) { return _mm256_max_ps(a, b); }
inline vf clamp(vf low, vf high, vf x) { return _mm256_max_ps(low, _mm256_min_ps(high, x)); }
inline bool any_greater(vf a, vf b) {
    return _mm256_movemask_ps(_mm256_cmp_ps(a, b, _CMP_GT_OQ)) != 0;
}
inline bool any_equal(vf a, vf b) {
    return _mm256_movemask_ps(_mm256_cmp_ps(a, b, _CMP_EQ_OQ)) != 0;
}
inline vf select_greater(vf a, vf b, vf x, vf y) {
    return _mm256_blendv_ps(y, x, _mm256_cmp_ps(a, b, _CMP_GT_OQ));
}
inline vf keep_lanes(vf x, int64_t begin, int64_t end, vf other) {
    const __m256i lanes = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
    const __m256i too_low = _mm256_cmpgt_epi32(_mm256_set1_epi32(int(begin)), lanes);
    const __m256i low_enough = _mm256_cmpgt_epi32(_mm256_set1_epi32(int(end)), lanes);
    const __m256i kept = _mm256_andnot_si256(too_low, low_enough);
    return _mm256_blendv_ps(other, x, _mm256_castsi256_ps(kept));
}

inline float reduce_add(vf a) {
    __m128 s = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    s = _mm_add_ps(s, _mm_movehl_ps(s, s));
    return _mm_cvtss_f32(_mm_add_ss(s, _mm_movehdup_ps(s)));
}
inline float reduce_max(vf a) {
    __m128 s = _mm_max_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    s = _mm_max_ps(s, _mm_movehl_ps(s, s));
    return _mm_cvtss_f32(_mm_max_ss(s, _mm_movehdup_ps(s)));
}

inline vi round_to_int(vf a) { return _mm256_cvtps_epi32(a); }
inline vf to_float(vi a) { return _mm256_cvtepi32_ps(a); }
inline vi half_of(vi a) { return _mm256_srai_epi32(a, 1); }
inline vi sub(vi a, vi b) { return _mm256_sub_epi32(a, b); }
inline vf power_of_2(vi n) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(n, _mm256_set1_epi32(127)), 23));
}

template <typename Rows>
inline __attribute__((always_inline)) void load_transposed(const Rows &rows, int64_t i,
                                                           vf (&transposed)[kLanes]) {
#pragma GCC unroll 2
    for (int c = 0; c < 8; c += 4) {
        vf r[4]; // columns [c, c + 4) of rows j and j + 4
#pragma GCC unroll 4
        for (int j = 0; j < 4; ++j) {
            r[j] = _mm256_insertf128_ps(_mm256_castps128_ps256(_mm_loadu_ps(rows.row(j) + i + c)),
                                        _mm_loadu_ps(rows.row(j + 4) + i + c), 1);
        }
        const vf a = _mm256_unpacklo_ps(r[0], r[1]);
        const vf b = _mm256_unpackhi_ps(r[0], r[1]);
        const vf d = _mm256_unpacklo_ps(r[2], r[3]);
        const vf e = _mm256_unpackhi_ps(r[2], r[3]);
        transposed[c] = _mm256_shuffle_ps(a, d, 0x44);
        transposed[c + 1] = _mm256_shuffle_ps(a, d, 0xee);
        transposed[c + 2] = _mm256_shuffle_ps(b, e, 0x44);
        transposed[c + 3] = _mm256_shuffle_ps(b, e, 0xee);
    }
}

constexpr int kMaxTileRows = 7;
constexpr int kTileRows = 6;
// 5 and 6 rows saturate both FMA pipes, and 2 rows with twice the width; 3 and 4 rows do not.
constexpr int64_t tile_height(int64_t m) {
    return m <= 6 ? m : m % 6 == 0 || m % 6 == 2 || m % 6 == 5 ? 6 : 5;
}
constexpr int kDirectTiles = 6;
constexpr bool broadcasts_rows(int rows) { return 3 <= rows && rows <= kTileRows; }
constexpr int tile_vectors(int rows) { return rows <= 3 ? 4 : 2; }
constexpr int64_t kBlockK = 256;
constexpr int kStreamBytes = 4096;
constexpr int kFarStreamBytes = 16384;

} // namespace llaisys::LLAISYS_CPU_NS

#include "device/cpu/simd_x86.hpp"
