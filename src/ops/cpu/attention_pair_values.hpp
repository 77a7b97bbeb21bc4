// Weighted sums of bf16 values as dot products of pairs: weights are rounded to bf16, and a lane adds
// two entries after the other two. Included after simd_avx512.hpp; compiled for AVX-512 BF16.
//
// The weight of an entry that a row does not see is zero; its value in a pair is replaced by zero too,
// since it may be infinite or NaN.
#pragma once

#include "ops/cpu/attention_tile.hpp"
#include "ops/cpu/pair_tile.hpp"

namespace llaisys::LLAISYS_CPU_NS {

constexpr int64_t kValueStep = 2; // entries that are added together

// Prefetch steps of add_values for n rows.
inline int64_t value_steps(int64_t, int64_t ldo) { return ldo / kPanel * (kTile / 8); }

// A row of weights takes half of its row of scores, which was read before.
inline void store_weight(float *row, int64_t e, vf weight) {
    _mm256_storeu_si256(reinterpret_cast<__m256i *>(reinterpret_cast<bf16_t *>(row) + e),
                        __m256i(_mm512_cvtneps_pbh(weight)));
}

// Values [c, c + kPanel) of an entry, zero from n on.
inline __m512i load_entry(const bf16_t *p, int64_t c, int64_t n) {
    const int64_t rest = n - c;
    const __mmask32 mask = rest >= kPanel ? ~__mmask32(0) : (__mmask32(1) << rest) - 1;
    return _mm512_maskz_loadu_epi16(mask, p + c);
}

// scratch.values[i, c] = values c of the entries 2i and 2i + 1 of the tile; absent ones are zero.
inline void load_values(const AttentionTask &task, const TilePlaces &places,
                        const AttentionScratch &scratch) {
    alignas(64)
        int16_t order[2][kPanel]; // of the columns of two entries: c, c + 32 (the second's c)
    for (int16_t c = 0; c < kPanel; ++c) {
        order[c / 16][c % 16 * 2] = c;
        order[c / 16][c % 16 * 2 + 1] = int16_t(c + kPanel);
    }
    const __m512i low = _mm512_load_si512(order[0]);
    const __m512i high = _mm512_load_si512(order[1]);
    const bf16_t *cache = static_cast<const bf16_t *>(task.v_cache);
    const int64_t first = places.first - places.tile;
    const int64_t last = places.last - places.tile;
    const auto values_of = [&](int64_t e, int64_t c) {
        return first <= e && e < last ? load_entry(cache + places.offset[e], c, task.value_dim)
                                      : _mm512_setzero_si512();
    };
    for (int64_t e = first / 2 * 2; e < last; e += 2) {
        float *to = scratch.values + e / 2 * task.ldo;
        for (int64_t c = 0; c < task.ldo; c += kPanel) {
            const __m512i a = values_of(e, c);
            const __m512i b = values_of(e + 1, c);
            _mm512_storeu_si512(to + c, _mm512_permutex2var_epi16(a, low, b));
            _mm512_storeu_si512(to + c + 16, _mm512_permutex2var_epi16(a, high, b));
        }
    }
}

// o[row, c...] += weights[row, pair] * values[pair, c...] for rows [first, first + n) of the row tile
// and the entries of `range`.
inline void add_values(const AttentionTask &task, const AttentionScratch &scratch,
                       const AttentionState &state, const TilePlaces &, const RowTile &rows,
                       int64_t first, int64_t n, Range range, TileFetch &fetch) {
    if (range.empty()) {
        return;
    }
    constexpr int kWeightBytes = int(kTile * int64_t(sizeof(float)));
    const char *weights = reinterpret_cast<const char *>(scratch.scores + first * kTile);
    const int64_t begin = (range.begin + 1) / 2; // whole pairs
    const int64_t end = range.end / 2;
    for (int64_t c = 0; c < task.ldo; c += kPanel) {
        float *o = state.o + (rows.first + first) * task.ldo + c;
        const auto add = [&](int64_t pair, int64_t pairs, const void *values) {
            const PairOperands from = {weights + pair * 4, 0, static_cast<const char *>(values),
                                       task.ldo * int64_t(sizeof(float))};
            dot_pair_rows<Start::sums, kWeightBytes>(n, from, pairs, o, task.ldo,
                                                     SharedFetch{&fetch});
        };
        const auto add_half = [&](int64_t pair, int32_t mask) {
            const __m512i kept = _mm512_set1_epi32(mask);
            const float *values = scratch.values + pair * task.ldo + c;
            alignas(64) int32_t half[kPanel];
            _mm512_store_si512(half, _mm512_and_si512(kept, _mm512_loadu_si512(values)));
            _mm512_store_si512(half + 16, _mm512_and_si512(kept, _mm512_loadu_si512(values + 16)));
            add(pair, 1, half);
        };
        if (range.begin % 2 != 0) {
            add_half(range.begin / 2, int32_t(0xffff0000));
        }
        if (begin < end) {
            add(begin, end - begin, scratch.values + begin * task.ldo + c);
        }
        if (range.end % 2 != 0) {
            add_half(end, 0x0000ffff);
        }
    }
}

} // namespace llaisys::LLAISYS_CPU_NS
