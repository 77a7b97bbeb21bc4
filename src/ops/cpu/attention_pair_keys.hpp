// Attention scores as products of pairs of bf16: of bf16 keys, or of 8-bit keys, which are exact in bf16;
// their scales multiply the scores. Queries are rounded to bf16. Included after simd_avx512.hpp and one
// attention_pair_{vectors,tiles}.hpp; compiled per instruction set.
//
// Many rows: keys are transposed to [d / 2][entry][2], and scores are queries times keys. Few rows:
// queries are transposed to [d / 2][row][2] instead, and scores are keys times queries, transposed. Both
// add the same products in the same order.
#pragma once

#include "ops/cpu/attention_pair_rows.hpp"
#include "ops/cpu/attention_tile.hpp"
#include "ops/cpu/prepared_attention.hpp"

namespace llaisys::LLAISYS_CPU_NS {

constexpr bool kScoresAreScaled = false; // by the scales of 8-bit keys

constexpr int64_t kAwakeEntries = 16; // loaded between two calls of keep_awake

// Prefetch steps of load_keys and load_values, and of score_rows for n rows.
inline int64_t load_steps(int64_t) { return kTile / 4 + kTile / 4; }
inline int64_t score_steps(int64_t n, int64_t d) { return dot_steps(n, kTile, d / 2); }

// Whether queries are transposed, for n rows of a KV head.
constexpr bool transposes_queries(int64_t n) { return n <= RowTiles::kEntryRows; }
inline bool transposes_queries(const AttentionTask &task) {
    return transposes_queries(task.n_tokens * task.group);
}

// In place: n rows of d values of bf16, ldq floats apart, or their pairs [d / 2, n].
inline void prepare_queries(float *q, int64_t n, int64_t ldq, int64_t d) {
    constexpr int64_t kRows = larger(RowTiles::kEntryRows, 1);
    alignas(64) float rows[kRows * ops::cpu::kMaxTileHead / 2]; // of pairs
    const bool is_transposed = transposes_queries(n);
    for (int64_t r = 0; r < n; ++r) {
        const float *from = q + r * ldq;
        bf16_t *to = reinterpret_cast<bf16_t *>(is_transposed ? rows + r * d / 2 : q + r * ldq);
        for (int64_t i = 0; i < d; i += kLanes) {
            store(to + i, load(from + i));
        }
    }
    for (int64_t i = 0; is_transposed && i < d / 2; ++i) {
        for (int64_t r = 0; r < n; ++r) {
            q[i * n + r] = rows[r * d / 2 + i];
        }
    }
}

// A tile of keys in scratch.keys, which has room for both.
struct PairKeys {
    float *transposed; // [d / 2, kTile] pairs; few rows: scores [kTile, kEntryRows] instead
    bf16_t *rows;      // [kTile, d]

    PairKeys(float *keys, int64_t d)
        : transposed(keys), rows(reinterpret_cast<bf16_t *>(keys + kTile * d / 2)) {}
};

template <typename T>
void copy_keys(const AttentionTask &task, const TilePlaces &places, const T *cache, bf16_t *rows,
               TileFetch &fetch) {
    for (int64_t e = 0; e < kTile; ++e) {
        if (e % 4 == 0) {
            fetch.step();
        }
        if (e % kAwakeEntries == 0) {
            RowTiles::keep_awake();
        }
        const T *key = cache + places.offset[e];
        for (int64_t i = 0; i < task.d; i += kPanel) {
            _mm512_storeu_si512(rows + e * task.d + i, load_pairs(key + i));
        }
    }
}

// transposed[i, e] = values 2i and 2i + 1 of key e of the tile.
template <typename Keys> void transpose_keys(const Keys &keys, int64_t d, float *transposed) {
    for (int64_t e = 0; e < kTile; e += kLanes) {
        RowTiles::keep_awake();
        const Keys some = keys.from(e);
        for (int64_t i = 0; i < d / 2; i += kLanes) {
            vf columns[kLanes];
            load_transposed(AsFloats<Keys>{some}, i, columns);
#pragma GCC unroll 16
            for (int64_t j = 0; j < kLanes; ++j) {
                store(transposed + (i + j) * kTile + e, columns[j]);
            }
        }
    }
}

inline void load_keys(const AttentionTask &task, const TilePlaces &places, float *keys,
                      TileFetch &fetch) {
    const PairKeys tile(keys, task.d);
    const auto *pairs = static_cast<const bf16_t *>(task.k_cache);
    const bool is_transposed = !transposes_queries(task);
    if (is_transposed && task.k_dtype == LLAISYS_DTYPE_BF16) {
        fetch.step(kTile / 4);
        return transpose_keys(ListedKeys<bf16_t>{pairs, places.offset}, task.d, tile.transposed);
    }
    visit_pairs(task.k_cache, task.k_dtype,
                [&](auto *cache) { copy_keys(task, places, cache, tile.rows, fetch); });
    if (is_transposed) {
        transpose_keys(SpacedKeys<bf16_t>{tile.rows, task.d}, task.d, tile.transposed);
    }
}

// score_rows with transposed queries.
template <typename Tiles>
void score_entries(const AttentionTask &task, const PairKeys &keys, const RowTile &rows,
                   float *scores, Tiles &tiles, TileFetch &fetch) {
    constexpr int64_t kRow = Tiles::kEntryRows;
    const int64_t pair_bytes = task.n_tokens * task.group * int64_t(sizeof(float));
    tiles.dot_entries(rows.n, reinterpret_cast<const char *>(keys.rows),
                      reinterpret_cast<const char *>(task.q + rows.first), pair_bytes, task.d / 2,
                      keys.transposed, fetch);
    for (int64_t e = 0; e < kTile; e += kLanes) {
        const SpacedKeys<float> entries = {keys.transposed + e * kRow, kRow};
        for (int64_t r = 0; r < rows.n; r += 4) {
            vf four[4];
            load_four_transposed(entries, r, four);
            for (int64_t j = 0; j < smaller(rows.n - r, 4); ++j) {
                store(scores + (r + j) * kTile + e, four[j]);
            }
        }
    }
}

// scores[r, e] = q[rows.first + r] . key e for all entries of the tile.
inline void score_rows(const AttentionTask &task, const TilePlaces &, float *keys,
                       const RowTile &rows, float *scores, RowTiles &tiles, TileFetch &fetch) {
    constexpr int64_t kFloat = sizeof(float);
    const PairKeys tile(keys, task.d);
    if constexpr (RowTiles::kEntryRows > 0) {
        if (transposes_queries(task)) {
            return score_entries(task, tile, rows, scores, tiles, fetch);
        }
    }
    tiles.multiply({rows.n, reinterpret_cast<const char *>(task.q + rows.first * task.ldq),
                    task.ldq * kFloat, reinterpret_cast<const char *>(tile.transposed),
                    kTile * kFloat, task.d / 2, scores, kTile, kTile, false},
                   fetch);
}

} // namespace llaisys::LLAISYS_CPU_NS
