// Attention scores with keys in cache layout: lanes run along d and are reduced at the end. For
// short vectors, where transposing the keys costs more. Compiled per instruction set.
#pragma once

#include "ops/cpu/attention_tile.hpp"

namespace llaisys::LLAISYS_CPU_NS {

constexpr bool kScoresAreScaled = false; // by the scales of 8-bit keys
// Keys that n rows read together: the sums fill half of the registers.
constexpr int64_t kMaxKeys = 4;
constexpr int keys_together(int64_t n) { return n <= 4 ? int(kMaxKeys) : 2; }

// Prefetch steps of load_keys and score_rows for n rows.
inline int64_t load_steps(int64_t) { return 0; }
inline int64_t score_steps(int64_t n, int64_t) { return kTile / keys_together(n); }

// scores[r, e] = q[r] . keys[e] for `entries` keys. Rows of scores are kTile apart.
template <int rows, int entries, typename Q, typename Keys>
inline __attribute__((always_inline)) void dot_tile(Q q, Keys keys, int64_t d, float *scores) {
    vf sums[rows][entries];
#pragma GCC unroll 16
    for (int r = 0; r < rows; ++r) {
#pragma GCC unroll 4
        for (int e = 0; e < entries; ++e) {
            sums[r][e] = zero();
        }
    }
    decltype(keys.row(0)) at[entries];
#pragma GCC unroll 4
    for (int e = 0; e < entries; ++e) {
        at[e] = keys.row(e);
    }
    const auto step = [&](int64_t i, const auto &load_at) {
        vf k[entries];
#pragma GCC unroll 4
        for (int e = 0; e < entries; ++e) {
            k[e] = load_at(at[e] + i);
        }
#pragma GCC unroll 16
        for (int r = 0; r < rows; ++r) {
            const vf x = load_at(q.row(r) + i);
#pragma GCC unroll 4
            for (int e = 0; e < entries; ++e) {
                sums[r][e] = fma(x, k[e], sums[r][e]);
            }
        }
    };
    int64_t i = 0;
    for (; i + kLanes <= d; i += kLanes) {
        step(i, [](auto *p) { return load(p); });
    }
    if (i < d) {
        step(i, [=](auto *p) { return load_some(p, d - i); });
    }
#pragma GCC unroll 16
    for (int r = 0; r < rows; ++r) {
        store_sums(scores + r * kTile, sums[r]);
    }
}

// The same for n <= kMaxTileRows rows and at least the entries [first, last) of a tile.
template <int rows = kMaxTileRows, typename Q, typename Keys>
inline void dot_rows(int64_t n, Q q, const Keys &keys, int64_t d, float *scores, int64_t first,
                     int64_t last, TileFetch &fetch) {
    if constexpr (rows > 1) {
        if (n < rows) {
            return dot_rows<rows - 1>(n, q, keys, d, scores, first, last, fetch);
        }
    }
    constexpr int entries = keys_together(rows);
    for (int64_t e = first / entries * entries; e < last; e += entries) {
        fetch.step();
        dot_tile<rows, entries>(q, keys.from(e), d, scores + e);
    }
}

inline void load_keys(const AttentionTask &task, const TilePlaces &places, float *keys,
                      TileFetch &) {
    if (!is_direct(task)) {
        const int64_t first = (places.first - places.tile) / kMaxKeys * kMaxKeys;
        const int64_t last = ops::cpu::round_up(places.last - places.tile, kMaxKeys);
        widen_entries(task.k_cache, task.k_dtype, places, first, last, task.d, task.d, keys);
    }
}

// scores[r, e] = q[tile.first + r] . key e, at least the entries that the tile has.
inline void score_rows(const AttentionTask &task, const TilePlaces &places, const float *keys,
                       const RowTile &tile, float *scores, VectorRows &, TileFetch &fetch) {
    const float *q = task.q + tile.first * task.ldq;
    const auto score = [&](const auto &where) {
        const int64_t first = places.first - places.tile;
        const int64_t last = places.last - places.tile;
        if (task.ldq == ops::cpu::kQueryStride) {
            dot_rows(tile.n, FixedRows<ops::cpu::kQueryStride>{q}, where, task.d, scores, first,
                     last, fetch);
        } else {
            dot_rows(tile.n, StridedRows{q, task.ldq}, where, task.d, scores, first, last, fetch);
        }
    };
    if (is_direct(task)) {
        visit_cache(task.k_cache, task.k_dtype, [&](auto *cache) {
            using T = std::remove_const_t<std::remove_pointer_t<decltype(cache)>>;
            score(ListedKeys<T>{cache, places.offset});
        });
    } else {
        score(SpacedKeys<float>{keys, task.d});
    }
}

} // namespace llaisys::LLAISYS_CPU_NS
