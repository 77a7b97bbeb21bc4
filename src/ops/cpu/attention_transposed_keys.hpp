// Attention scores with keys transposed to [d][entry]: one entry is one lane that adds along d in
// order, like an output of linear. For long vectors, where horizontal sums cost more than
// transposing. Compiled per instruction set.
#pragma once

#include "ops/cpu/attention_tile.hpp"

namespace llaisys::LLAISYS_CPU_NS {

constexpr bool kScoresAreScaled = false; // by the scales of 8-bit keys
constexpr int64_t kTransposeSteps = 4;   // prefetch steps of transposing kLanes keys

// Prefetch steps of load_keys and score_rows for n rows.
inline int64_t load_steps(int64_t) { return kTransposeSteps * kTile / kLanes; }
inline int64_t score_steps(int64_t n, int64_t d) {
    return kTile / kPanel * tiles_across(n) * (d / 4);
}

// Columns [i, i + n) of kLanes keys, widened and transposed, into rows i.. of out.
template <typename Keys>
inline void transpose_some(const Keys &keys, int64_t i, int64_t n, float *out) {
    alignas(64) float wide[kLanes * kLanes];
    for (int j = 0; j < kLanes; ++j) {
        store(wide + j * kLanes, load_up_to(keys.row(j) + i, n));
    }
    vf transposed[kLanes];
    load_transposed(SpacedKeys<float>{wide, kLanes}, 0, transposed);
    for (int64_t j = 0; j < n; ++j) {
        store(out + (i + j) * kTile, transposed[j]);
    }
}

// All columns of kLanes keys of type T.
template <typename T, typename Keys>
inline void transpose_keys(const Keys &keys, int64_t d, float *out) {
    int64_t i = 0;
    if constexpr (std::is_same_v<T, float>) {
        for (; i + kLanes <= d; i += kLanes) {
            vf transposed[kLanes];
            load_transposed(keys, i, transposed);
#pragma GCC unroll 16
            for (int64_t j = 0; j < kLanes; ++j) {
                store(out + (i + j) * kTile, transposed[j]);
            }
        }
    } else if constexpr (std::is_same_v<T, int8_t>) {
        for (; i + 4 * kLanes <= d; i += 4 * kLanes) {
            vf transposed[kLanes];
            load_transposed(AsFloats<Keys>{keys}, i / 4, transposed);
#pragma GCC unroll 16
            for (int64_t j = 0; j < kLanes; ++j) {
                float *to = out + (i + 4 * j) * kTile;
                store(to, byte_of<0>(transposed[j]));
                store(to + kTile, byte_of<1>(transposed[j]));
                store(to + 2 * kTile, byte_of<2>(transposed[j]));
                store(to + 3 * kTile, byte_of<3>(transposed[j]));
            }
        }
    } else if constexpr (std::is_same_v<T, bf16_t>) {
        for (; i + 2 * kLanes <= d; i += 2 * kLanes) {
            vf transposed[kLanes];
            load_transposed(AsFloats<Keys>{keys}, i / 2, transposed);
#pragma GCC unroll 16
            for (int64_t j = 0; j < kLanes; ++j) {
                store(out + (i + 2 * j) * kTile, low_halves(transposed[j]));
                store(out + (i + 2 * j + 1) * kTile, high_halves(transposed[j]));
            }
        }
    }
    for (; i < d; i += kLanes) {
        transpose_some(keys, i, smaller(d - i, kLanes), out);
    }
}

// keys[i, e - tile] = k of entry e for the tile's entries; undefined for absent ones.
template <typename T>
void transpose_tile(const AttentionTask &task, const TilePlaces &places, const T *cache,
                    float *keys, TileFetch &fetch) {
    const bool is_spaced = task.block_size % kLanes == 0; // kLanes entries lie in one block
    for (int64_t e = 0; e < kTile; e += kLanes) {
        const int64_t *offset = places.offset + e;
        fetch.step(kTransposeSteps);
        if (is_spaced && places.first <= places.tile + e &&
            places.tile + e + kLanes <= places.last) {
            transpose_keys<T>(SpacedKeys<T>{cache + *offset, task.slot_stride}, task.d, keys + e);
        } else {
            transpose_keys<T>(ListedKeys<T>{cache, offset}, task.d, keys + e);
        }
    }
}

inline void load_keys(const AttentionTask &task, const TilePlaces &places, float *keys,
                      TileFetch &fetch) {
    visit_cache(task.k_cache, task.k_dtype,
                [&](auto *cache) { transpose_tile(task, places, cache, keys, fetch); });
}

// scores[r, e] = q[tile.first + r] . key e for all entries of the tile.
inline void score_rows(const AttentionTask &task, const TilePlaces &, const float *keys,
                       const RowTile &tile, float *scores, VectorRows &, TileFetch &fetch) {
    const float *q = task.q + tile.first * task.ldq;
    for (int64_t c = 0; c < kTile; c += kPanel) {
        const DenseRows<float> columns = {keys + c, kTile};
        if (task.ldq == ops::cpu::kQueryStride) {
            panel_rows<Start::zero>(tile.n, FixedRows<ops::cpu::kQueryStride>{q}, columns,
                                    scores + c, kTile, task.d, SharedFetch{&fetch});
        } else {
            panel_rows<Start::zero>(tile.n, StridedRows{q, task.ldq}, columns, scores + c, kTile,
                                    task.d, SharedFetch{&fetch});
        }
    }
}

} // namespace llaisys::LLAISYS_CPU_NS
