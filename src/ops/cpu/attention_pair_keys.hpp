// Attention scores of bf16 keys as products of pairs, with keys transposed to [d / 2][entry][2] and
// queries rounded to bf16. Included after simd_avx512.hpp and one attention_pair_{vectors,tiles}.hpp;
// compiled per instruction set.
#pragma once

#include "ops/cpu/attention_tile.hpp"

namespace llaisys::LLAISYS_CPU_NS {

constexpr bool kScoresAreScaled = false; // keys have no scales

// Prefetch steps of load_keys and load_values, and of score_rows for n rows.
inline int64_t load_steps(int64_t d) { return kTile / kLanes * (d / 2 / kLanes) + kTile / 4; }
inline int64_t score_steps(int64_t, int64_t d) { return dot_steps(kTile, d / 2); }

// In place: a row of f32 becomes d values of bf16.
inline void prepare_queries(float *q, int64_t n_rows, int64_t ldq, int64_t d) {
    for (int64_t r = 0; r < n_rows; ++r, q += ldq) {
        bf16_t *to = reinterpret_cast<bf16_t *>(q);
        for (int64_t i = 0; i < d; i += kLanes) {
            store(to + i, load(q + i));
        }
    }
}

// keys[i, e] = values 2i and 2i + 1 of entry e of the tile.
inline void load_keys(const AttentionTask &task, const TilePlaces &places, float *keys,
                      TileFetch &fetch) {
    for (int64_t e = 0; e < kTile; e += kLanes) {
        RowTiles::keep_awake();
        const ListedKeys<bf16_t> some = {static_cast<const bf16_t *>(task.k_cache),
                                         places.offset + e};
        for (int64_t i = 0; i < task.d / 2; i += kLanes) {
            fetch.step();
            vf transposed[kLanes];
            load_transposed(AsFloats<ListedKeys<bf16_t>>{some}, i, transposed);
#pragma GCC unroll 16
            for (int64_t j = 0; j < kLanes; ++j) {
                store(keys + (i + j) * kTile + e, transposed[j]);
            }
        }
    }
}

// scores[r, e] = q[first + r] . key e for n rows, all entries of the tile.
inline void score_rows(const AttentionTask &task, const TilePlaces &, const float *keys,
                       int64_t first, int64_t n, float *scores, TileFetch &fetch) {
    constexpr int kFloat = int(sizeof(float));
    constexpr int kQueryBytes = int(ops::cpu::kQueryStride) * kFloat;
    const PairOperands from = {reinterpret_cast<const char *>(task.q + first * task.ldq),
                               task.ldq * kFloat, reinterpret_cast<const char *>(keys),
                               kTile * kFloat};
    if (task.ldq == ops::cpu::kQueryStride) {
        dot_pair_rows<Start::zero, kQueryBytes>(n, from, task.d / 2, scores, kTile, kTile, fetch);
    } else {
        dot_pair_rows<Start::zero, 0>(n, from, task.d / 2, scores, kTile, kTile, fetch);
    }
}

} // namespace llaisys::LLAISYS_CPU_NS
