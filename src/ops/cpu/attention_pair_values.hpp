// Weighted sums of bf16 values as products of pairs: weights are rounded to bf16. Included after
// simd_avx512.hpp and one attention_pair_{vectors,tiles}.hpp; compiled per instruction set.
//
// The weight of an entry that a row does not see is zero. Where a value is infinite or NaN, the
// values that a row does not see are replaced by zero too.
#pragma once

#include "ops/cpu/attention_tile.hpp"
#include "ops/cpu/prepared_attention.hpp"

namespace llaisys::LLAISYS_CPU_NS {

constexpr int64_t kValueStep = 2 * kPairStep; // entries that are added together

// Prefetch steps of sum_rows for n rows.
inline int64_t value_steps(int64_t, int64_t ldo) { return dot_steps(ldo, kTile / 2); }

// e^x for x <= 0 within 2^-13, enough for weights that are rounded to bf16; 0 below -87, NaN stays NaN.
inline vf exp_weight(vf x) {
    const vf log2_e = set1(1.44269504f);
    const vf magic = set1(12582912.0f); // 1.5 * 2^23: the last bit of a sum with it is one
    const __mmask16 is_normal = _mm512_cmp_ps_mask(x, set1(-87.0f), _CMP_NLT_UQ);
    const vf n = sub(fma(x, log2_e, magic), magic);
    const vf r = fma(x, log2_e, sub(zero(), n));
    vf p = set1(0x1.c2a218p-5f); // 2^r on |r| <= 1 / 2, own minimax fit
    p = fma(p, r, set1(0x1.f00c4ep-3f));
    p = fma(p, r, set1(0x1.62f5fap-1f));
    p = fma(p, r, set1(1.0f));
    return _mm512_maskz_scalef_ps(is_normal, p, n); // without a mask denormals take 100 cycles
}

// A row of weights takes half of its row of scores, which was read before.
inline void store_weights(float *row, int64_t e, vf low, vf high) {
    _mm512_storeu_si512(reinterpret_cast<bf16_t *>(row) + e,
                        __m512i(_mm512_cvtne2ps_pbh(high, low)));
}

// Interleaves 32 values of two entries: both of column c are the pair c.
struct PairOrder {
    int16_t lanes[2][kPanel]; // of the columns 0 to 15 and 16 to 31
};
constexpr PairOrder pair_order() {
    PairOrder order{};
    for (int16_t c = 0; c < kPanel; ++c) {
        order.lanes[c / 16][c % 16 * 2] = c;
        order.lanes[c / 16][c % 16 * 2 + 1] = int16_t(c + kPanel);
    }
    return order;
}

// scratch.values[i, c] = values c of the entries 2i and 2i + 1 of the tile; absent ones are zero, for
// whole steps.
inline void load_values(const AttentionTask &task, const TilePlaces &places,
                        AttentionScratch &scratch, TileFetch &fetch) {
    alignas(64) static constexpr PairOrder kOrder = pair_order();
    alignas(64) static constexpr uint16_t kAbsent[ops::cpu::kMaxTileHead] = {};
    const __m512i low = _mm512_load_si512(kOrder.lanes[0]);
    const __m512i high = _mm512_load_si512(kOrder.lanes[1]);
    const __m512i magnitude = _mm512_set1_epi16(0x7fff);
    const bf16_t *cache = static_cast<const bf16_t *>(task.v_cache);
    const int64_t first = places.first - places.tile;
    const int64_t last = places.last - places.tile;
    const auto entry = [&](int64_t e) -> const void * {
        return first <= e && e < last ? static_cast<const void *>(cache + places.offset[e])
                                      : kAbsent;
    };
    const int64_t rest = task.value_dim % kPanel;
    const __mmask32 in_rest = (__mmask32(1) << rest) - 1;
    __m512i largest = _mm512_setzero_si512();
    const auto store_pairs = [&](float *to, __m512i a, __m512i b) {
        largest = _mm512_max_epu16(largest, _mm512_and_si512(a, magnitude));
        largest = _mm512_max_epu16(largest, _mm512_and_si512(b, magnitude));
        _mm512_storeu_si512(to, _mm512_permutex2var_epi16(a, low, b));
        _mm512_storeu_si512(to + 16, _mm512_permutex2var_epi16(a, high, b));
    };
    const int64_t end = ops::cpu::round_up(last, kValueStep);
    for (int64_t e = first / kValueStep * kValueStep; e < end; e += 2) {
        if (e % 4 == 0) {
            fetch.step();
            RowTiles::keep_awake();
        }
        const auto *a = static_cast<const int16_t *>(entry(e));
        const auto *b = static_cast<const int16_t *>(entry(e + 1));
        float *to = scratch.values + e / 2 * task.ldo;
        int64_t c = 0;
        for (; c + kPanel <= task.value_dim; c += kPanel) {
            store_pairs(to + c, _mm512_loadu_si512(a + c), _mm512_loadu_si512(b + c));
        }
        if (rest != 0) {
            store_pairs(to + c, _mm512_maskz_loadu_epi16(in_rest, a + c),
                        _mm512_maskz_loadu_epi16(in_rest, b + c));
        }
    }
    constexpr int16_t kInfinity = 0x7f80; // larger ones are NaN
    scratch.is_finite = _mm512_cmpge_epu16_mask(largest, _mm512_set1_epi16(kInfinity)) == 0;
}

// o[row, c...] += weights[row, pair] * values[pair, c...] for rows [first, first + n) of the row tile
// and the steps that contain the entries of `range`; weights are zero outside it.
inline void add_values(const AttentionTask &task, const AttentionScratch &scratch,
                       const AttentionState &state, const RowTile &rows, int64_t first, int64_t n,
                       Range range, const float *values, TileFetch &fetch) {
    constexpr int kWeightBytes = int(kTile * int64_t(sizeof(float)));
    const int64_t pair = range.begin / kValueStep * kPairStep;
    const int64_t pairs = ops::cpu::round_up(range.end, kValueStep) / 2 - pair;
    const PairOperands from = {
        reinterpret_cast<const char *>(scratch.scores + first * kTile + pair), kWeightBytes,
        reinterpret_cast<const char *>(values + pair * task.ldo),
        task.ldo * int64_t(sizeof(float))};
    dot_pair_rows<Start::sums, kWeightBytes>(
        n, from, pairs, state.o + (rows.first + first) * task.ldo, task.ldo, task.ldo, fetch);
}

// out = the values of the tile, zero outside `seen`.
inline void copy_seen(const AttentionTask &task, const float *values, Range seen, float *out) {
    for (int64_t e = 0; e < kTile; ++e) {
        const bool is_seen = seen.begin <= e && e < seen.end;
        for (int64_t c = 0; c < task.ldo; ++c) {
            const int64_t at = 2 * (e / 2 * task.ldo + c) + e % 2;
            reinterpret_cast<bf16_t *>(out)[at] =
                is_seen ? reinterpret_cast<const bf16_t *>(values)[at] : bf16_t{};
        }
    }
}

inline void sum_rows(const AttentionTask &task, const AttentionScratch &scratch,
                     const AttentionState &state, const TilePlaces &, const RowTile &rows,
                     RowTiles &tiles, TileFetch &fetch) {
    if (scratch.is_finite) {
        return add_values(task, scratch, state, rows, 0, rows.n, rows.all, scratch.values, fetch);
    }
    float *seen_values = scratch.values + kTile / 2 * task.ldo;
    tiles.begin(1);
    for (int64_t r = 0; r < rows.n; ++r) {
        const Range seen = rows.seen_by_row(task, r);
        copy_seen(task, scratch.values, seen, seen_values);
        add_values(task, scratch, state, rows, r, 1, seen, seen_values, fetch);
    }
}

} // namespace llaisys::LLAISYS_CPU_NS
