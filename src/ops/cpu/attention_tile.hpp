// A tile of keys and values in the KV cache: entry offsets, prefetching and widening. Compiled per
// instruction set.
#pragma once

#include "ops/cpu/row_kernels.hpp"
#include "ops/cpu/tile.hpp"

namespace llaisys::LLAISYS_CPU_NS {

using ops::cpu::AttentionState;
using ops::cpu::AttentionTask;
using ops::cpu::kTile;

inline int64_t bytes_of(DType dtype) { return traits_of(dtype).block_bytes; }

// Offsets of a tile's entries, in elements from slot 0, for entries [first, last).
struct TilePlaces {
    int64_t tile;
    int64_t first;
    int64_t last;
    int64_t offset[kTile]; // of entry tile + i; that of `first` outside [first, last)

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

// Prefetches the next tile's keys and values of all heads into L2 while the current tile is
// computed, at an even pace over `steps` steps: a core supports few outstanding misses, and a burst
// would stall the arithmetic.
class TileFetch {
public:
    TileFetch(const AttentionTask &task, const TilePlaces &places, int64_t steps) {
        const int64_t n = larger(places.last - places.first, 0);
        const int64_t *offset = places.offset + (places.first - places.tile);
        const char *k = static_cast<const char *>(task.k_cache);
        const char *v = static_cast<const char *>(task.v_cache);
        const int64_t k_size = bytes_of(task.k_dtype);
        const int64_t v_size = bytes_of(task.v_dtype);
        for (int64_t e = 0; e < n; ++e) {
            rows_[e] = k + offset[e] * k_size;
            rows_[n + e] = v + offset[e] * v_size;
        }
        const int64_t n_rows = k == v ? n : 2 * n; // the keys may contain the values
        bytes_ = larger(task.n_heads * task.head_stride, task.d) * larger(k_size, v_size);
        row_ = rows_;
        end_ = rows_ + n_rows;
        due_ = 0;
        pace_ = (n_rows * bytes_ + steps - 1) / steps;
    }

    // Prefetch what is due after n more steps.
    void step(int64_t n = 1) {
        due_ += n * pace_;
        while (due_ > 0 && row_ < end_) {
            const char *piece = *row_ + at_;
            const int64_t bytes = smaller(bytes_ - at_, kPiece);
            for (int64_t i = 0; i < bytes; i += 64) {
                __builtin_prefetch(piece + i, 0, 2);
            }
            due_ -= bytes;
            at_ += bytes;
            if (at_ == bytes_) {
                at_ = 0;
                ++row_;
            }
        }
    }

private:
    static constexpr int64_t kPiece = 256; // bytes of a row that are prefetched together

    const char *rows_[2 * kTile]; // of keys, then of values
    const char **row_;
    const char **end_;
    int64_t bytes_;  // of a row
    int64_t at_ = 0; // bytes of *row_ that were prefetched
    int64_t due_;    // bytes due but not yet prefetched
    int64_t pace_;   // bytes per step
};

// No prefetch, for register tiles that prefetch themselves.
struct SharedFetch {
    TileFetch *fetch;
    void step() { fetch->step(); }
    SharedFetch after(int64_t) const { return *this; }
};

// Key addresses: arbitrary, or at a fixed stride, which saves loading them.
template <typename T> struct ListedKeys {
    const T *p;
    const int64_t *offset;
    const T *row(int64_t j) const { return p + offset[j]; }
    ListedKeys from(int64_t j) const { return {p, offset + j}; }
};
template <typename T> struct SpacedKeys {
    const T *p;
    int64_t stride;
    const T *row(int64_t j) const { return p + j * stride; }
    SpacedKeys from(int64_t j) const { return {row(j), stride}; }
};

// The same memory as f32: pairs of bf16 and groups of four bytes are transposed like one f32.
template <typename Keys> struct AsFloats {
    const Keys &keys;
    const float *row(int j) const { return reinterpret_cast<const float *>(keys.row(j)); }
};

// Few rows read keys and values directly from the cache; many rows share a widened copy of the
// tile.
inline bool is_direct(const AttentionTask &task) {
    return task.n_tokens * task.group <= kMaxTileRows && task.value_dim == task.ldo;
}

// 8-bit values are used as integers: key scales multiply scores, value scales multiply weights.
inline bool has_scales(const AttentionTask &task) { return task.k_dtype == LLAISYS_DTYPE_I8; }

// out[e] = scale of entry e of the tile; that of the first entry for absent ones.
inline void load_scales(const void *cache, const TilePlaces &places, int64_t d, float *out) {
    const char *scale = static_cast<const char *>(cache) + d;
    for (int64_t e = 0; e < kTile; ++e) {
        __builtin_memcpy(out + e, scale + places.offset[e], sizeof *out);
    }
}

// scores[r, e] *= scales[e] for n rows.
inline void scale_rows(float *scores, int64_t n, const float *scales) {
    for (int64_t r = 0; r < n; ++r) {
        for (int64_t e = 0; e < kTile; e += kLanes) {
            float *score = scores + r * kTile + e;
            store(score, mul(load(score), load(scales + e)));
        }
    }
}

// Calls f(cache) with the cache pointer in its element type.
template <typename F> inline void visit_cache(const void *cache, DType dtype, const F &f) {
    switch (dtype) {
    case LLAISYS_DTYPE_F16:
        return f(static_cast<const f16_t *>(cache));
    case LLAISYS_DTYPE_BF16:
        return f(static_cast<const bf16_t *>(cache));
    case LLAISYS_DTYPE_F32:
        return f(static_cast<const float *>(cache));
    case LLAISYS_DTYPE_I8:
        return f(static_cast<const int8_t *>(cache));
    default:
        ops::cpu::no_rows(dtype);
    }
}
// out[e, :] = entry e of the cache, for entries [first, last) of the tile; columns from d to ld are
// zero.
inline void widen_entries(const void *cache, DType dtype, const TilePlaces &places, int64_t first,
                          int64_t last, int64_t d, int64_t ld, float *out) {
    visit_cache(cache, dtype, [&](auto *rows) {
        for (int64_t e = first; e < last; ++e) {
            convert_row(out + e * ld, rows + places.offset[e], d);
            for (int64_t i = d; i < ld; ++i) {
                out[e * ld + i] = 0.0f;
            }
        }
    });
}

// Buffers of a call, in the scratch of the task.
struct AttentionScratch {
    float *keys;    // as written by load_keys: at most kTile keys of f32
    float *values;  // as written by load_values: at most [kTile, ldo]
    bool is_finite; // values in pairs: all that some row does not see, and their scales, are finite
    float *scores;  // [rows of a tile, kTile], then weights as store_weights stores them
    float *k_scales; // [kTile], 8-bit keys only, where keys are floats
    float *v_scales; // [kTile]
    float *weights;  // [rows of all heads, kLanes]: each row's l so far, one partial sum per lane

    explicit AttentionScratch(const AttentionTask &task) {
        static_assert(kMaxTileRows <= ops::cpu::kMaxRowTile && kLanes <= 16);
        keys = task.scratch;
        values = keys + ops::cpu::attention_key_floats(task.d);
        scores = values + kTile * task.ldo;
        k_scales = scores + ops::cpu::kMaxRowTile * kTile;
        v_scales = k_scales + kTile;
        weights = v_scales + kTile;
    }
};

// Division of rows into register tiles of vectors. x is in L1 at known offsets: the highest tile is
// best. Tile registers: attention_pair_tiles.hpp.
struct VectorRows {
    static constexpr int64_t kEntryRows = 0; // scores are always those of rows
    explicit VectorRows(int64_t) {}
    static int64_t height(int64_t rows) { return rows <= kMaxTileRows ? rows : tile_height(rows); }
    static void keep_awake() {}
};

// acc [rows, columns] = or, if is_sum, += `pairs` pairs of x times those of w. Rows of acc are lda
// floats apart, rows of x and the pairs of columns of w at these distances in bytes.
struct PairProduct {
    int64_t rows;
    const char *x;
    int64_t x_row;
    const char *w;
    int64_t w_pair;
    int64_t pairs;
    float *acc;
    int64_t lda;
    int64_t columns;
    bool is_sum;
};

struct Range {
    int64_t begin;
    int64_t end;
    bool empty() const { return begin >= end; }
};

// Entries of the tile that a token attends to, relative to the tile's start.
inline Range seen_by(const AttentionTask &task, int64_t token, int64_t tile) {
    return {larger(task.begin[token] - tile, 0), smaller(task.end[token] - tile, kTile)};
}

// Rows [first, first + n) of the task, one register tile high; each of their tokens attends to some
// entry of the tile.
struct RowTile {
    int64_t first;
    int64_t n;
    int64_t tile;
    Range common; // entries visible to all rows; may be empty
    Range all;    // every entry that some row sees
    bool is_same; // all rows see the same entries

    RowTile(const AttentionTask &task, int64_t tile, int64_t first, int64_t n)
        : first(first), n(n), tile(tile), common({0, kTile}), all({kTile, 0}), is_same(true) {
        const int64_t last_token = (first + n - 1) / task.group;
        const Range last = seen_by(task, last_token, tile);
        for (int64_t t = first / task.group; t <= last_token; ++t) {
            const Range seen = seen_by(task, t, tile);
            is_same = is_same && seen.begin == last.begin && seen.end == last.end;
            common = {larger(common.begin, seen.begin), smaller(common.end, seen.end)};
            all = {smaller(all.begin, seen.begin), larger(all.end, seen.end)};
        }
    }

    // Every row sees the whole tile.
    bool sees_all() const { return common.begin == 0 && common.end == kTile; }
    Range seen_by_row(const AttentionTask &task, int64_t r) const {
        return is_same ? common : seen_by(task, (first + r) / task.group, tile);
    }
};

} // namespace llaisys::LLAISYS_CPU_NS
