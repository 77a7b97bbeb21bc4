// Attention scores of bf16 keys in tile registers. Keys are read from the cache as they are. A query
// is the sum of two bf16, exact to 16 bits. Every score is summed in the same order whatever the
// other rows and entries are, so results do not depend on the batch. Included after simd_<isa>.hpp
// and the definition of KeyTiles (device/cpu/tiles.hpp); compiled per instruction set.
//
// Bound: a tile product of 16 cycles for 16 entries x 32 values x 8 query rows, where vector code
// takes 256 and transposes the keys before.
#pragma once

#include "device/cpu/tiles.hpp"
#include "ops/cpu/attention_tile.hpp"
#include "ops/cpu/prepared_attention.hpp"

namespace llaisys::LLAISYS_CPU_NS {

constexpr bool kScoresAreScaled = false; // keys have no scales
constexpr int64_t kStepK = 32;           // values of d per tile product
constexpr int64_t kQueryBlock = 8;       // query rows per tile product
constexpr int64_t kSumColumns = 2 * kQueryBlock;

// Prefetch steps of load_keys and score_rows for n rows.
inline int64_t load_steps() { return 0; }
inline int64_t score_steps(int64_t n, int64_t d) {
    return (n + kQueryBlock - 1) / kQueryBlock * (d / kStepK);
}

// Query rows of a head, in blocks of kQueryBlock rows; the last may have fewer. In place of its rows
// a block has [d / 2][rows] entries of 8 bytes: two adjacent values of a row as bf16, then what is
// left of them as bf16.
inline void prepare_queries(float *q, int64_t n_rows, int64_t ldq, int64_t d) {
    alignas(64) bf16_t parts[kQueryBlock][2][ops::cpu::kMaxTileHead];
    for (int64_t first = 0; first < n_rows; first += kQueryBlock, q += kQueryBlock * ldq) {
        const int64_t rows = smaller(kQueryBlock, n_rows - first);
        for (int64_t r = 0; r < rows; ++r) {
            for (int64_t i = 0; i < d; i += kLanes) {
                const vf x = load(q + r * ldq + i);
                store(parts[r][0] + i, x);
                store(parts[r][1] + i, sub(x, load(parts[r][0] + i)));
            }
        }
        char *out = reinterpret_cast<char *>(q);
        for (int64_t i = 0; i < d; i += 2) {
            for (int64_t r = 0; r < rows; ++r, out += 8) {
                __builtin_memcpy(out, parts[r][0] + i, 4);
                __builtin_memcpy(out + 4, parts[r][1] + i, 4);
            }
        }
    }
}

// Addresses of 16 keys.
struct KeyRows {
    const bf16_t *p;
    int64_t stride; // bytes
};
constexpr int64_t kKeyGroups = kTile / kTileHeight;

// Whether the 16 keys from entry e of the tile on exist and lie at a fixed stride.
inline bool is_spaced(const AttentionTask &task, const TilePlaces &places, int64_t e) {
    return task.block_size % kTileHeight == 0 && places.first <= places.tile + e &&
           places.tile + e + kTileHeight <= places.last;
}

// Copies the keys that are not at a fixed stride to keys [kTile, d], in bf16.
inline void load_keys(const AttentionTask &task, const TilePlaces &places, float *keys,
                      TileFetch &) {
    bf16_t *copies = reinterpret_cast<bf16_t *>(keys);
    const bf16_t *cache = static_cast<const bf16_t *>(task.k_cache);
    for (int64_t e = 0; e < kTile; ++e) {
        if (!is_spaced(task, places, e / kTileHeight * kTileHeight)) {
            std::memcpy(copies + e * task.d, cache + places.offset[e],
                        size_t(task.d) * sizeof(bf16_t));
        }
    }
}

// sums [kTile, kSumColumns] = keys times a block of queries: two columns for each of `rows` rows.
inline void multiply_keys(const KeyRows (&keys)[kKeyGroups], const float *block, int64_t rows,
                          int64_t d, float *sums, TileFetch &fetch) {
    static_assert(kKeyGroups == 4);
    constexpr int64_t kRow = kSumColumns * int64_t(sizeof(float));
    const int n = int(rows) * 8; // bytes of a row of queries and of sums
    KeyTiles::configure({{16, 16, 16, 16, 16, 16, 0, 0}, {n, n, n, n, n, 64, 0, 0}});
    KeyTiles::zero<0>();
    KeyTiles::zero<1>();
    KeyTiles::zero<2>();
    KeyTiles::zero<3>();
    const char *q = reinterpret_cast<const char *>(block);
    for (int64_t k = 0; k < d; k += kStepK, q += kStepK / 2 * n) {
        fetch.step();
        KeyTiles::load<4>(q, n);
        KeyTiles::load<5>(keys[0].p + k, keys[0].stride);
        KeyTiles::dot_bf16<0, 5, 4>();
        KeyTiles::load<5>(keys[1].p + k, keys[1].stride);
        KeyTiles::dot_bf16<1, 5, 4>();
        KeyTiles::load<5>(keys[2].p + k, keys[2].stride);
        KeyTiles::dot_bf16<2, 5, 4>();
        KeyTiles::load<5>(keys[3].p + k, keys[3].stride);
        KeyTiles::dot_bf16<3, 5, 4>();
    }
    KeyTiles::store<0>(sums, kRow);
    KeyTiles::store<1>(sums + kTileHeight * kSumColumns, kRow);
    KeyTiles::store<2>(sums + 2 * kTileHeight * kSumColumns, kRow);
    KeyTiles::store<3>(sums + 3 * kTileHeight * kSumColumns, kRow);
    KeyTiles::release();
}

// scores[r, e] = the sum of both columns of row r of the block, for rows [first, last).
inline void store_scores(const float *sums, int64_t first, int64_t last, float *scores) {
    for (int64_t e = 0; e < kTile; e += kLanes) {
        const SpacedKeys<float> some = {sums + e * kSumColumns, kSumColumns};
        for (int64_t c = 0; c < kSumColumns; c += kLanes) {
            vf columns[kLanes];
            load_transposed(some, c, columns);
#pragma GCC unroll 8
            for (int i = 0; i < kLanes; i += 2) {
                const int64_t r = (c + i) / 2;
                if (first <= r && r < last) {
                    store(scores + r * kTile + e, add(columns[i], columns[i + 1]));
                }
            }
        }
    }
}

// scores[r, e] = q[first + r] . key e for n rows, all entries of the tile.
inline void score_rows(const AttentionTask &task, const TilePlaces &places, const float *keys,
                       int64_t first, int64_t n, float *scores, TileFetch &fetch) {
    alignas(64) float sums[kTile * kSumColumns] = {};
    KeyRows rows[kKeyGroups];
    for (int64_t g = 0; g < kKeyGroups; ++g) {
        const int64_t e = g * kTileHeight;
        if (is_spaced(task, places, e)) {
            rows[g] = {static_cast<const bf16_t *>(task.k_cache) + places.offset[e],
                       task.slot_stride * int64_t(sizeof(bf16_t))};
        } else {
            rows[g] = {reinterpret_cast<const bf16_t *>(keys) + e * task.d,
                       task.d * int64_t(sizeof(bf16_t))};
        }
    }
    const int64_t all = task.n_tokens * task.group;
    for (int64_t b = first / kQueryBlock * kQueryBlock; b < first + n; b += kQueryBlock) {
        multiply_keys(rows, task.q + b * task.ldq, smaller(kQueryBlock, all - b), task.d, sums,
                      fetch);
        store_scores(sums, larger(first - b, 0), smaller(first + n - b, kQueryBlock),
                     scores + (b - first) * kTile);
    }
}

} // namespace llaisys::LLAISYS_CPU_NS
