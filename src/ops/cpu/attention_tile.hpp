// A tile of keys and values on its way from the cache to the kernel: keys are widened and turned to
// [d][entry], values widened to [entry][d]. Compiled per instruction set.
#pragma once

#include "ops/cpu/row_kernels.hpp"
#include "ops/cpu/tile.hpp"

namespace llaisys::LLAISYS_CPU_NS {

using ops::cpu::AttentionTask;
using ops::cpu::kTile;

inline int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }
inline int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }

// Where the entries of one tile lie: offsets in elements from slot 0, for entries [first, last).
struct TilePlaces {
    int64_t tile;
    int64_t first;
    int64_t last;
    int64_t offset[kTile]; // of entry tile + i; that of `first` for those outside of [first, last)

    void find(const AttentionTask &task, int64_t tile_begin, int64_t begin, int64_t end) {
        tile = tile_begin;
        first = begin;
        last = end;
        if (begin >= end) {
            return;
        }
        int64_t block = begin / task.block_size;
        int64_t inside = begin % task.block_size;
        for (int64_t e = begin; e < end; ++block, inside = 0) {
            int64_t place =
                (int64_t(task.table[block]) * task.block_size + inside) * task.slot_stride;
            const int64_t block_end = smaller(end, e + task.block_size - inside);
            for (; e < block_end; ++e, place += task.slot_stride) {
                offset[e - tile] = place;
            }
        }
        for (int64_t e = tile; e < begin; ++e) {
            offset[e - tile] = offset[begin - tile];
        }
        for (int64_t e = end; e < tile + kTile; ++e) {
            offset[e - tile] = offset[begin - tile];
        }
    }
};

// Brings the next tile's keys and values into the second cache, a few rows at a time between the
// steps of the current tile, so that reading and computing overlap.
class TileFetch {
public:
    TileFetch(const AttentionTask &task, const TilePlaces &places, int64_t steps)
        : offset_(places.offset + places.first - places.tile),
          end_(offset_ + (places.last - places.first)),
          rows_((places.last - places.first + steps - 1) / steps),
          k_(static_cast<const char *>(task.k_cache)), v_(static_cast<const char *>(task.v_cache)),
          k_size_(size_of(task.k_dtype)), v_size_(size_of(task.v_dtype)),
          bytes_(task.d * larger(k_size_, v_size_)) {}

    void step() {
        const int64_t *last = end_ - offset_ > rows_ ? offset_ + rows_ : end_;
        for (; offset_ < last; ++offset_) {
            const char *k = k_ + *offset_ * k_size_;
            const char *v = v_ + *offset_ * v_size_;
            for (int64_t i = 0; i < bytes_; i += 64) {
                __builtin_prefetch(k + i, 0, 2);
                __builtin_prefetch(v + i, 0, 2);
            }
        }
    }

private:
    static int64_t size_of(DType dtype) { return dtype == LLAISYS_DTYPE_F32 ? 4 : 2; }

    const int64_t *offset_; // of the next row
    const int64_t *end_;
    int64_t rows_; // a step
    const char *k_;
    const char *v_;
    int64_t k_size_;
    int64_t v_size_;
    int64_t bytes_; // of a row
};

// Columns [i, i + n) of kLanes keys, widened and turned, into rows i.. of keys.
template <typename T>
inline void turn_some(const T *const (&rows)[kLanes], int64_t i, int64_t n, float *keys) {
    alignas(64) float wide[kLanes][kLanes];
    const float *at[kLanes];
    for (int j = 0; j < kLanes; ++j) {
        store(wide[j], load_up_to(rows[j] + i, n));
        at[j] = wide[j];
    }
    vf turned[kLanes];
    load_turned(at, 0, turned);
    for (int64_t j = 0; j < n; ++j) {
        store(keys + (i + j) * kTile, turned[j]);
    }
}

// All columns of kLanes keys.
template <typename T>
inline void turn_keys(const T *const (&rows)[kLanes], int64_t d, float *keys) {
    for (int64_t i = 0; i < d; i += kLanes) {
        turn_some(rows, i, smaller(d - i, kLanes), keys);
    }
}
inline void turn_keys(const float *const (&rows)[kLanes], int64_t d, float *keys) {
    int64_t i = 0;
    for (; i + kLanes <= d; i += kLanes) {
        vf turned[kLanes];
        load_turned(rows, i, turned);
#pragma GCC unroll 16
        for (int64_t j = 0; j < kLanes; ++j) {
            store(keys + (i + j) * kTile, turned[j]);
        }
    }
    if (i < d) {
        turn_some(rows, i, d - i, keys);
    }
}
// Pairs of bf16 are turned like one f32 and widened afterwards.
inline void turn_keys(const bf16_t *const (&rows)[kLanes], int64_t d, float *keys) {
    const float *pairs[kLanes];
    for (int j = 0; j < kLanes; ++j) {
        pairs[j] = reinterpret_cast<const float *>(rows[j]);
    }
    int64_t i = 0;
    for (; i + 2 * kLanes <= d; i += 2 * kLanes) {
        vf turned[kLanes];
        load_turned(pairs, i / 2, turned);
#pragma GCC unroll 16
        for (int64_t j = 0; j < kLanes; ++j) {
            store(keys + (i + 2 * j) * kTile, low_halves(turned[j]));
            store(keys + (i + 2 * j + 1) * kTile, high_halves(turned[j]));
        }
    }
    for (; i < d; i += kLanes) {
        turn_some(rows, i, smaller(d - i, kLanes), keys);
    }
}

// keys[i, e - tile] = k of entry e for the tile's entries, anything for those it has not.
template <typename T>
void load_keys(const AttentionTask &task, const TilePlaces &places, float *keys, TileFetch &fetch) {
    const T *cache = static_cast<const T *>(task.k_cache);
    for (int64_t e = 0; e < kTile; e += kLanes) {
        const T *rows[kLanes];
        for (int j = 0; j < kLanes; ++j) {
            rows[j] = cache + places.offset[e + j];
        }
        turn_keys(rows, task.d, keys + e);
        fetch.step();
    }
}

// values[e - tile, :] = v of entry e; columns from d to ldo are zero.
template <typename T>
void load_values(const AttentionTask &task, const TilePlaces &places, float *values,
                 TileFetch &fetch) {
    const T *cache = static_cast<const T *>(task.v_cache);
    for (int64_t e = places.first; e < places.last; ++e) {
        float *row = values + (e - places.tile) * task.ldo;
        convert_row(row, cache + places.offset[e - places.tile], task.d);
        for (int64_t i = task.d; i < task.ldo; ++i) {
            row[i] = 0.0f;
        }
        if (e % kLanes == 0) {
            fetch.step();
        }
    }
}

} // namespace llaisys::LLAISYS_CPU_NS
