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
inline int64_t bytes_of(DType dtype) { return dtype == LLAISYS_DTYPE_F32 ? 4 : 2; }

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

// Brings the next tile's keys and values into the second cache, one entry a step, between the
// products of the current tile: a core has few misses under way at a time, and more of them at once
// would hold up the arithmetic.
class TileFetch {
public:
    TileFetch(const AttentionTask &task, const TilePlaces &places)
        : offset_(places.offset + (places.first - places.tile)),
          end_(offset_ + (places.last - places.first)), k_(static_cast<const char *>(task.k_cache)),
          v_(static_cast<const char *>(task.v_cache)), k_size_(bytes_of(task.k_dtype)),
          v_size_(bytes_of(task.v_dtype)), bytes_(task.d * larger(k_size_, v_size_)) {}

    void step() {
        if (offset_ < end_) {
            const char *k = k_ + *offset_ * k_size_;
            const char *v = v_ + *offset_ * v_size_;
            for (int64_t i = 0; i < bytes_; i += 64) {
                __builtin_prefetch(k + i, 0, 2);
                __builtin_prefetch(v + i, 0, 2);
            }
            ++offset_;
        }
    }

private:
    const int64_t *offset_; // of the next entry
    const int64_t *end_;
    const char *k_;
    const char *v_;
    int64_t k_size_;
    int64_t v_size_;
    int64_t bytes_; // of a row
};

// For register tiles, which keep a fetch of their own.
struct SharedFetch {
    TileFetch *fetch;
    void step() { fetch->step(); }
    SharedFetch after(int64_t) const { return *this; }
};

// Where kLanes keys lie: anywhere, or at a fixed distance, which saves loading their addresses.
template <typename T> struct ListedKeys {
    const T *p;
    const int64_t *offset;
    const T *row(int j) const { return p + offset[j]; }
};
template <typename T> struct SpacedKeys {
    const T *p;
    int64_t stride;
    const T *row(int j) const { return p + j * stride; }
};
// The same memory as f32: pairs of bf16 are turned like one f32 and widened afterwards.
template <typename Keys> struct Pairs {
    const Keys &keys;
    const float *row(int j) const { return reinterpret_cast<const float *>(keys.row(j)); }
};

// Columns [i, i + n) of kLanes keys, widened and turned, into rows i.. of out.
template <typename Keys> inline void turn_some(const Keys &keys, int64_t i, int64_t n, float *out) {
    alignas(64) float wide[kLanes * kLanes];
    for (int j = 0; j < kLanes; ++j) {
        store(wide + j * kLanes, load_up_to(keys.row(j) + i, n));
    }
    vf turned[kLanes];
    load_turned(SpacedKeys<float>{wide, kLanes}, 0, turned);
    for (int64_t j = 0; j < n; ++j) {
        store(out + (i + j) * kTile, turned[j]);
    }
}

// All columns of kLanes keys of type T.
template <typename T, typename Keys>
inline void turn_keys(const Keys &keys, int64_t d, float *out) {
    int64_t i = 0;
    if constexpr (dtype_of<T>::value == LLAISYS_DTYPE_F32) {
        for (; i + kLanes <= d; i += kLanes) {
            vf turned[kLanes];
            load_turned(keys, i, turned);
#pragma GCC unroll 16
            for (int64_t j = 0; j < kLanes; ++j) {
                store(out + (i + j) * kTile, turned[j]);
            }
        }
    } else if constexpr (dtype_of<T>::value == LLAISYS_DTYPE_BF16) {
        for (; i + 2 * kLanes <= d; i += 2 * kLanes) {
            vf turned[kLanes];
            load_turned(Pairs<Keys>{keys}, i / 2, turned);
#pragma GCC unroll 16
            for (int64_t j = 0; j < kLanes; ++j) {
                store(out + (i + 2 * j) * kTile, low_halves(turned[j]));
                store(out + (i + 2 * j + 1) * kTile, high_halves(turned[j]));
            }
        }
    }
    for (; i < d; i += kLanes) {
        turn_some(keys, i, smaller(d - i, kLanes), out);
    }
}

// keys[i, e - tile] = k of entry e for the tile's entries, anything for those it has not.
template <typename T>
void load_keys(const AttentionTask &task, const TilePlaces &places, float *keys) {
    const T *cache = static_cast<const T *>(task.k_cache);
    const bool is_spaced = task.block_size % kLanes == 0; // kLanes entries are within one block
    for (int64_t e = 0; e < kTile; e += kLanes) {
        const int64_t *offset = places.offset + e;
        if (is_spaced && places.first <= places.tile + e &&
            places.tile + e + kLanes <= places.last) {
            turn_keys<T>(SpacedKeys<T>{cache + *offset, task.slot_stride}, task.d, keys + e);
        } else {
            turn_keys<T>(ListedKeys<T>{cache, offset}, task.d, keys + e);
        }
    }
}

// values[e - tile, :] = v of entry e; columns from d to ldo are zero.
template <typename T>
void load_values(const AttentionTask &task, const TilePlaces &places, float *values) {
    const T *cache = static_cast<const T *>(task.v_cache);
    for (int64_t e = places.first; e < places.last; ++e) {
        float *row = values + (e - places.tile) * task.ldo;
        convert_row(row, cache + places.offset[e - places.tile], task.d);
        for (int64_t i = task.d; i < task.ldo; ++i) {
            row[i] = 0.0f;
        }
    }
}

} // namespace llaisys::LLAISYS_CPU_NS
