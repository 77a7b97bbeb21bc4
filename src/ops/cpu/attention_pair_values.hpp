// Weighted sums of bf16 or 8-bit values as products of pairs: weights are rounded to bf16. Included after
// simd_avx512.hpp and one attention_pair_{vectors,tiles}.hpp; compiled per instruction set.
//
// The weight of an entry that a row does not see is zero. Where such a value or scale may be infinite or
// NaN, the values that a row does not see are replaced by zero too.
#pragma once

#include "ops/cpu/attention_pair_rows.hpp"
#include "ops/cpu/attention_tile.hpp"
#include "ops/cpu/prepared_attention.hpp"

namespace llaisys::LLAISYS_CPU_NS {

constexpr int64_t kValueStep = 2 * kPairStep; // entries that are added together

// Prefetch steps of sum_rows for n rows.
inline int64_t value_steps(int64_t n, int64_t ldo) { return dot_steps(n, ldo, kTile / 2); }

// e^x for x <= 88 within 2^-13, enough for weights that are rounded to bf16; 0 below -87, NaN stays NaN.
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

// Whether every token that attends to the tile sees all its entries, and there are kTile.
inline bool is_seen_whole(const AttentionTask &task, const TilePlaces &places) {
    bool is_whole = places.last - places.first == kTile;
    for (int64_t t = 0; t < task.n_tokens; ++t) {
        const Range seen = seen_by(task, t, places.tile);
        is_whole = is_whole && (seen.empty() || seen.end - seen.begin == kTile);
    }
    return is_whole;
}

// scratch.values[i, c] = values c of the entries 2i and 2i + 1 of the tile; absent ones are zero, for
// whole steps. Returns whether all are finite, if `checks`.
template <bool checks, typename T>
bool interleave_values(const AttentionTask &task, const TilePlaces &places, const T *cache,
                       float *values, TileFetch &fetch) {
    alignas(64) static constexpr T kAbsent[ops::cpu::kMaxTileHead] = {};
    const int64_t first = places.first - places.tile;
    const int64_t last = places.last - places.tile;
    const auto entry = [&](int64_t e) {
        return first <= e && e < last ? cache + places.offset[e] : kAbsent;
    };
    __m512i largest = _mm512_setzero_si512();
    const auto store_pairs = [&](float *to, const EntryPairs &pairs) {
        for (int i = 0; i < 2; ++i) {
            if constexpr (checks) {
                const __m512i magnitude = _mm512_set1_epi16(0x7fff);
                largest = _mm512_max_epu16(largest, _mm512_and_si512(pairs.columns[i], magnitude));
            }
            _mm512_storeu_si512(to + 16 * i, pairs.columns[i]);
        }
    };
    const int64_t rest = task.value_dim % kPanel;
    const int64_t end = ops::cpu::round_up(last, kValueStep);
    for (int64_t e = first / kValueStep * kValueStep; e < end; e += 2) {
        if (e % 4 == 0) {
            fetch.step();
        }
        if (e % kAwakeEntries == 0) {
            RowTiles::keep_awake();
        }
        const T *a = entry(e);
        const T *b = entry(e + 1);
        float *to = values + e / 2 * task.ldo;
        int64_t c = 0;
        for (; c + kPanel <= task.value_dim; c += kPanel) {
            store_pairs(to + c, pairs_of_entries(a + c, b + c));
        }
        if (rest != 0) {
            store_pairs(to + c, pairs_of_entries(SomeValues<T>(a + c, rest).values,
                                                 SomeValues<T>(b + c, rest).values));
        }
    }
    constexpr int16_t kInfinity = 0x7f80; // larger ones are NaN
    return _mm512_cmpge_epu16_mask(largest, _mm512_set1_epi16(kInfinity)) == 0;
}

// The values of the tile; 8-bit values without their scales, which multiply the weights.
inline void load_values(const AttentionTask &task, const TilePlaces &places,
                        AttentionScratch &scratch, TileFetch &fetch) {
    const bool is_whole = is_seen_whole(task, places);
    visit_pairs(task.v_cache, task.v_dtype, [&](auto *cache) {
        using T = std::remove_const_t<std::remove_pointer_t<decltype(cache)>>;
        const bool is_checked = !is_whole && std::is_same_v<T, bf16_t>;
        const auto interleave =
            is_checked ? interleave_values<true, T> : interleave_values<false, T>;
        scratch.is_finite = interleave(task, places, cache, scratch.values, fetch);
    });
    if (has_scales(task) && !is_whole) {
        vf nothing = zero(); // NaN if any scale is NaN or infinite
        for (int64_t e = 0; e < kTile; e += kLanes) {
            nothing = fma(load(scratch.v_scales + e), zero(), nothing);
        }
        scratch.is_finite = reduce_add(nothing) == 0.0f;
    }
}

// o[row, c...] += weights[row, pair] * values[pair, c...] for rows [first, first + n) of the row tile
// and the steps that contain the entries of `range`; weights are zero outside it.
inline void add_values(const AttentionTask &task, const AttentionScratch &scratch,
                       const AttentionState &state, const RowTile &rows, int64_t first, int64_t n,
                       Range range, const float *values, RowTiles &tiles, TileFetch &fetch) {
    constexpr int64_t kFloat = sizeof(float);
    const int64_t pair = range.begin / kValueStep * kPairStep;
    const int64_t pairs = ops::cpu::round_up(range.end, kValueStep) / 2 - pair;
    tiles.multiply({n, reinterpret_cast<const char *>(scratch.scores + first * kTile + pair),
                    kTile * kFloat, reinterpret_cast<const char *>(values + pair * task.ldo),
                    task.ldo * kFloat, pairs, state.o + (rows.first + first) * task.ldo, task.ldo,
                    task.ldo, true},
                   fetch);
}

// out = the values of the tile, zero outside `seen`; so are the weights of row r of the row tile.
inline void copy_seen(const AttentionTask &task, const AttentionScratch &scratch, int64_t r,
                      Range seen, float *out) {
    bf16_t *weights = reinterpret_cast<bf16_t *>(scratch.scores + r * kTile);
    const auto *from = reinterpret_cast<const bf16_t *>(scratch.values);
    for (int64_t e = 0; e < kTile; ++e) {
        const bool is_seen = seen.begin <= e && e < seen.end;
        weights[e] = is_seen ? weights[e] : bf16_t{};
        for (int64_t c = 0; c < task.ldo; ++c) {
            const int64_t at = 2 * (e / 2 * task.ldo + c) + e % 2;
            reinterpret_cast<bf16_t *>(out)[at] = is_seen ? from[at] : bf16_t{};
        }
    }
}

inline void sum_rows(const AttentionTask &task, const AttentionScratch &scratch,
                     const AttentionState &state, const TilePlaces &, const RowTile &rows,
                     RowTiles &tiles, TileFetch &fetch) {
    if (scratch.is_finite) {
        return add_values(task, scratch, state, rows, 0, rows.n, rows.all, scratch.values, tiles,
                          fetch);
    }
    float *seen_values = scratch.values + kTile / 2 * task.ldo;
    for (int64_t r = 0; r < rows.n; ++r) {
        const Range seen = rows.seen_by_row(task, r);
        copy_seen(task, scratch, r, seen, seen_values);
        add_values(task, scratch, state, rows, r, 1, seen, seen_values, tiles, fetch);
    }
}

} // namespace llaisys::LLAISYS_CPU_NS
