// Attention of some rows over one span of a list, tile by tile. A tile's keys are widened and
// turned to [d][entry], its values widened to [entry][d] (or read in place by few rows); scores and
// sums are then the register tiles of tile.hpp, strictly along d and along the entries. Compiled
// per instruction set.
#pragma once

#include "ops/cpu/row_kernels.hpp"
#include "ops/cpu/tile.hpp"

namespace llaisys::LLAISYS_CPU_NS {

using ops::cpu::AttentionState;
using ops::cpu::AttentionTask;
using ops::cpu::kTile;

// The buffers of a call, cut out of the task's scratch.
struct AttentionScratch {
    float *keys;       // [d, kTile]
    float *values;     // [kTile, ldo]
    float *scores;     // [rows, kTile]
    float *sums;       // [rows, ldo]: of the current tile
    float *m;          // [rows]: of the current tile
    float *l;          // [rows]
    float *old_factor; // [rows]
    float *new_factor; // [rows]

    explicit AttentionScratch(const AttentionTask &task) {
        const int64_t rows = task.n_tokens * task.group;
        const int64_t padded = ops::cpu::round_up(rows, 16);
        keys = task.scratch;
        values = keys + task.d * kTile;
        scores = values + kTile * task.ldo;
        sums = scores + rows * kTile;
        m = sums + rows * task.ldo;
        l = m + padded;
        old_factor = l + padded;
        new_factor = old_factor + padded;
    }
};

// Where the entries of one tile lie: offsets in elements from slot 0, for entries [first, last).
struct TilePlaces {
    int64_t tile;
    int64_t first;
    int64_t last;
    int64_t offset[kTile]; // of entry tile + i; undefined outside of [first, last)

    void find(const AttentionTask &task, int64_t tile_begin, int64_t begin, int64_t end) {
        tile = tile_begin;
        first = begin;
        last = end;
        int64_t block = begin / task.block_size;
        int64_t inside = begin % task.block_size;
        for (int64_t e = begin; e < end; ++e) {
            offset[e - tile] =
                (int64_t(task.table[block]) * task.block_size + inside) * task.slot_stride;
            if (++inside == task.block_size) {
                inside = 0;
                ++block;
            }
        }
    }
};

// Brings the next tile's keys and values into the second cache, a few rows at a time between the
// steps of the current tile, so that reading and computing overlap.
class TileFetch {
public:
    TileFetch(const AttentionTask &task, const TilePlaces &places, int64_t steps)
        : places_(places), k_(static_cast<const char *>(task.k_cache)),
          v_(static_cast<const char *>(task.v_cache)), k_size_(size_of(task.k_dtype)),
          v_size_(size_of(task.v_dtype)), d_(task.d), next_(places.first),
          rows_((places.last - places.first + steps - 1) / steps) {}

    void step() {
        for (int64_t i = 0; i < rows_ && next_ < places_.last; ++i, ++next_) {
            const int64_t offset = places_.offset[next_ - places_.tile];
            touch(k_ + offset * k_size_, d_ * k_size_);
            touch(v_ + offset * v_size_, d_ * v_size_);
        }
    }

private:
    static int64_t size_of(DType dtype) { return dtype == LLAISYS_DTYPE_F32 ? 4 : 2; }
    static void touch(const char *p, int64_t bytes) {
        for (int64_t i = 0; i < bytes; i += 64) {
            __builtin_prefetch(p + i, 0, 2);
        }
    }

    const TilePlaces &places_;
    const char *k_;
    const char *v_;
    int64_t k_size_;
    int64_t v_size_;
    int64_t d_;
    int64_t next_;
    int64_t rows_; // entries a step
};

// Columns [i, i + n) of kLanes keys, turned, into rows i.. of keys. Null rows give zeros.
template <typename T>
inline void turn_keys(const T *const (&rows)[kLanes], int64_t i, int64_t n, float *keys) {
    vf block[kLanes];
    for (int j = 0; j < kLanes; ++j) {
        block[j] = rows[j] == nullptr ? zero() : load_up_to(rows[j] + i, n);
    }
    transpose(block);
    for (int64_t j = 0; j < n; ++j) {
        store(keys + (i + j) * kTile, block[j]);
    }
}

// The same for 2 * kLanes columns of bf16 at once: pairs are turned first and widened after.
inline void turn_pairs(const bf16_t *const (&rows)[kLanes], int64_t i, float *keys) {
    vf block[kLanes];
    for (int j = 0; j < kLanes; ++j) {
        block[j] = rows[j] == nullptr ? zero() : load_raw_pairs(rows[j] + i);
    }
    transpose(block);
    for (int64_t j = 0; j < kLanes; ++j) {
        vf low;
        vf high;
        split_pairs(block[j], low, high);
        store(keys + (i + 2 * j) * kTile, low);
        store(keys + (i + 2 * j + 1) * kTile, high);
    }
}
template <typename T> inline void turn_pairs(const T *const (&)[kLanes], int64_t, float *) {}

// keys[i, e - tile] = k of entry e for the tile's entries, zero for those it has not.
template <typename T>
void load_keys(const AttentionTask &task, const TilePlaces &places, float *keys, TileFetch &fetch) {
    constexpr bool is_bf16 = sizeof(T) == 2 && dtype_of<T>::value == LLAISYS_DTYPE_BF16;
    const T *cache = static_cast<const T *>(task.k_cache);
    for (int64_t e = 0; e < kTile; e += kLanes, keys += kLanes) {
        const T *rows[kLanes];
        for (int j = 0; j < kLanes; ++j) {
            const int64_t entry = places.tile + e + j;
            const bool used = entry >= places.first && entry < places.last;
            rows[j] = used ? cache + places.offset[e + j] : nullptr;
        }
        int64_t i = 0;
        for (; is_bf16 && i + 2 * kLanes <= task.d; i += 2 * kLanes) {
            turn_pairs(rows, i, keys);
        }
        for (; i < task.d; i += kLanes) {
            turn_keys(rows, i, task.d - i < kLanes ? task.d - i : kLanes, keys);
        }
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

// Few rows take the values straight from the cache; many share a widened copy of the tile.
inline bool is_direct(const AttentionTask &task) {
    return task.n_tokens * task.group <= kMaxTileRows && task.d == task.ldo;
}

inline void load_tile(const AttentionTask &task, const TilePlaces &places,
                      const AttentionScratch &scratch, TileFetch &fetch) {
    switch (task.k_dtype) {
    case LLAISYS_DTYPE_F16:
        load_keys<f16_t>(task, places, scratch.keys, fetch);
        break;
    case LLAISYS_DTYPE_BF16:
        load_keys<bf16_t>(task, places, scratch.keys, fetch);
        break;
    default:
        load_keys<float>(task, places, scratch.keys, fetch);
    }
    if (is_direct(task)) {
        return;
    }
    switch (task.v_dtype) {
    case LLAISYS_DTYPE_F16:
        return load_values<f16_t>(task, places, scratch.values, fetch);
    case LLAISYS_DTYPE_BF16:
        return load_values<bf16_t>(task, places, scratch.values, fetch);
    default:
        return load_values<float>(task, places, scratch.values, fetch);
    }
}

struct Range {
    int64_t begin;
    int64_t end;
    bool empty() const { return begin >= end; }
};

inline int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }
inline int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }

// What token t sees of the tile, counted from the tile's start.
inline Range seen_of(const AttentionTask &task, int64_t t, int64_t tile) {
    return {larger(task.begin[t] - tile, 0), smaller(task.end[t] - tile, kTile)};
}

// Turns a row of kTile scores into weights relative to their largest; those not seen become 0.
inline void weigh_row(float *scores, Range seen, float &m, float &l) {
    for (int64_t i = 0; i < seen.begin; ++i) {
        scores[i] = -__builtin_inff();
    }
    for (int64_t i = larger(seen.end, 0); i < kTile; ++i) {
        scores[i] = -__builtin_inff();
    }
    vf best = load(scores);
    for (int i = kLanes; i < kTile; i += kLanes) {
        best = max_num(load(scores + i), best);
    }
    m = reduce_max(best);
    vf sum = zero();
    for (int i = 0; i < kTile; i += kLanes) {
        const vf weight = exp(sub(load(scores + i), set1(m)));
        store(scores + i, weight);
        sum = add(sum, weight);
    }
    l = reduce_add(sum);
}

// sums[row, :] += weights[row, e] * values[e, :] for rows [first, first + n) over entries `range`.
template <typename T>
void add_cached(const AttentionTask &task, const AttentionScratch &scratch,
                const TilePlaces &places, int64_t first, int64_t n, Range range, int64_t c) {
    const ListedRows<T> rows = {static_cast<const T *>(task.v_cache) + c,
                                places.offset + range.begin};
    panel(n, scratch.scores + first * kTile + range.begin, kTile, rows,
          scratch.sums + first * task.ldo + c, task.ldo, range.end - range.begin);
}

inline void add_values(const AttentionTask &task, const AttentionScratch &scratch,
                       const TilePlaces &places, int64_t first, int64_t n, Range range,
                       TileFetch &fetch) {
    if (range.empty()) {
        return;
    }
    for (int64_t c = 0; c < task.ldo; c += kPanel) {
        if (!is_direct(task)) {
            const DenseRows<float> rows = {scratch.values + range.begin * task.ldo + c, task.ldo};
            panel(n, scratch.scores + first * kTile + range.begin, kTile, rows,
                  scratch.sums + first * task.ldo + c, task.ldo, range.end - range.begin);
        } else if (task.v_dtype == LLAISYS_DTYPE_F16) {
            add_cached<f16_t>(task, scratch, places, first, n, range, c);
        } else if (task.v_dtype == LLAISYS_DTYPE_BF16) {
            add_cached<bf16_t>(task, scratch, places, first, n, range, c);
        } else {
            add_cached<float>(task, scratch, places, first, n, range, c);
        }
        fetch.step();
    }
}

// The weighted sums of all rows. What all tokens see is done for all rows at once; what is before
// and after it for each token, so that no row meets a value that it does not see.
inline void sum_values(const AttentionTask &task, const AttentionScratch &scratch,
                       const TilePlaces &places, TileFetch &fetch) {
    const int64_t tile = places.tile;
    Range common = {0, kTile};
    for (int64_t t = 0; t < task.n_tokens; ++t) {
        const Range seen = seen_of(task, t, tile);
        if (!seen.empty()) {
            common = {larger(common.begin, seen.begin), smaller(common.end, seen.end)};
        }
    }
    if (common.empty()) {
        common = {kTile, kTile};
    }
    for (int64_t t = 0; t < task.n_tokens; ++t) {
        const Range seen = seen_of(task, t, tile);
        add_values(task, scratch, places, t * task.group, task.group,
                   {seen.begin, smaller(seen.end, common.begin)}, fetch);
    }
    add_values(task, scratch, places, 0, task.n_tokens * task.group, common, fetch);
    for (int64_t t = 0; t < task.n_tokens; ++t) {
        const Range seen = seen_of(task, t, tile);
        add_values(task, scratch, places, t * task.group, task.group,
                   {larger(seen.begin, common.end), seen.end}, fetch);
    }
}

// total = total (+) part, row by row; factors are scratch of `rows` rounded up to 16.
inline void merge_states(const AttentionState &total, const AttentionState &part, int64_t rows,
                         int64_t ldo, float *old_factor, float *new_factor) {
    for (int64_t i = 0; i < rows; i += kLanes) { // m is padded, so the last vector may be whole
        const vf old_m = load(total.m + i);
        const vf new_m = load(part.m + i);
        const vf m = max_num(old_m, new_m);
        const vf safe = max_num(m, set1(-3.0e38f)); // both empty: exp(-inf - safe) is 0, not NaN
        store(old_factor + i, exp(sub(old_m, safe)));
        store(new_factor + i, exp(sub(new_m, safe)));
        store(total.m + i, m);
    }
    for (int64_t r = 0; r < rows; ++r) {
        if (part.l[r] == 0.0f) { // nothing seen: as if the part had not been there
            continue;
        }
        total.l[r] = total.l[r] * old_factor[r] + part.l[r] * new_factor[r];
        const vf a = set1(old_factor[r]);
        const vf b = set1(new_factor[r]);
        for (int64_t i = 0; i < ldo; i += kLanes) {
            float *o = total.o + r * ldo + i;
            store(o, fma(load(part.o + r * ldo + i), b, mul(load(o), a)));
        }
    }
}

inline void clear(float *p, int64_t n, float value) {
    for (int64_t i = 0; i < n; ++i) {
        p[i] = value;
    }
}

// Scores of all rows, a register tile of rows at a time while it is in the first cache, and their
// weights.
inline void weigh_rows(const AttentionTask &task, const AttentionScratch &scratch, int64_t tile,
                       TileFetch &fetch) {
    const int64_t rows = task.n_tokens * task.group;
    for (int64_t first = 0; first < rows; first += kMaxTileRows) {
        const int64_t n = smaller(kMaxTileRows, rows - first);
        float *scores = scratch.scores + first * kTile;
        for (int64_t c = 0; c < kTile; c += kPanel) {
            panel(n, task.q + first * task.ldq, task.ldq, DenseRows<float>{scratch.keys + c, kTile},
                  scores + c, kTile, task.d);
            fetch.step();
        }
        for (int64_t r = first; r < first + n; ++r, scores += kTile) {
            const Range seen = seen_of(task, r / task.group, tile);
            if (seen.empty()) {
                clear(scores, kTile, 0.0f);
                scratch.m[r] = -__builtin_inff();
                scratch.l[r] = 0.0f;
            } else {
                weigh_row(scores, seen, scratch.m[r], scratch.l[r]);
            }
        }
        fetch.step();
    }
}

// One tile: leaves its state in scratch.{m, l, sums}; fetches the tile at `next` on the way.
inline void attention_tile(const AttentionTask &task, const AttentionScratch &scratch,
                           const TilePlaces &places, const TilePlaces &next) {
    const int64_t rows = task.n_tokens * task.group;
    const int64_t row_tiles = (rows + kMaxTileRows - 1) / kMaxTileRows;
    const int64_t loads = (is_direct(task) ? 1 : 2) * (kTile / kLanes);
    TileFetch fetch(task, next, loads + 3 * row_tiles + task.ldo / kPanel);
    load_tile(task, places, scratch, fetch);
    clear(scratch.scores, rows * kTile, 0.0f);
    clear(scratch.sums, rows * task.ldo, 0.0f);
    weigh_rows(task, scratch, places.tile, fetch);
    sum_values(task, scratch, places, fetch);
}

inline void attention_span(const AttentionTask &task, const AttentionState &state, int64_t first,
                           int64_t last) {
    const AttentionScratch scratch(task);
    const int64_t rows = task.n_tokens * task.group;
    const int64_t padded = ops::cpu::round_up(rows, 16);
    clear(state.m, padded, -__builtin_inff());
    clear(scratch.m, padded, -__builtin_inff());
    clear(state.l, rows, 0.0f);
    clear(state.o, rows * task.ldo, 0.0f);
    const AttentionState part = {scratch.m, scratch.l, scratch.sums};
    TilePlaces places[2];
    int64_t tile = first / kTile * kTile;
    places[0].find(task, tile, first, smaller(last, tile + kTile));
    for (int turn = 0; tile < last; tile += kTile, turn = 1 - turn) {
        TilePlaces &next = places[1 - turn];
        next.find(task, tile + kTile, smaller(task.limit, tile + kTile),
                  smaller(task.limit, tile + 2 * kTile));
        attention_tile(task, scratch, places[turn], next);
        merge_states(state, part, rows, task.ldo, scratch.old_factor, scratch.new_factor);
        next.last = smaller(next.last, last);
    }
}

inline void attention_merge(const AttentionState &total, const AttentionState &part, int64_t rows,
                            int64_t ldo) {
    for (int64_t first = 0; first < rows; first += 16) {
        float old_factor[16];
        float new_factor[16];
        const int64_t n = smaller(16, rows - first);
        merge_states({total.m + first, total.l + first, total.o + first * ldo},
                     {part.m + first, part.l + first, part.o + first * ldo}, n, ldo, old_factor,
                     new_factor);
    }
}

} // namespace llaisys::LLAISYS_CPU_NS
