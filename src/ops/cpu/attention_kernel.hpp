// Attention of some rows over one span of a list, tile by tile. A tile's keys are widened and turned
// to [d][entry], its values widened to [entry][d]; scores and sums are then the register tiles of
// tile.hpp, strictly along d and along the entries. Compiled per instruction set.
#pragma once

#include "ops/cpu/row_kernels.hpp"
#include "ops/cpu/tile.hpp"

namespace llaisys::LLAISYS_CPU_NS {

using ops::cpu::AttentionState;
using ops::cpu::AttentionTask;
using ops::cpu::kTile;

// The buffers of a call, cut out of the task's scratch.
struct AttentionScratch {
    float *keys;   // [d, kTile]
    float *values; // [kTile, ldo]
    float *scores; // [rows, kTile]
    float *sums;   // [rows, ldo]: of the current tile
    float *m;      // [rows]: of the current tile
    float *l;      // [rows]
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

// Slot of entry e.
inline int64_t slot_of(const AttentionTask &task, int64_t e) {
    if (task.block_size == 1) {
        return task.table[e];
    }
    return int64_t(task.table[e / task.block_size]) * task.block_size + e % task.block_size;
}

// keys[i, e - tile] = k of entry e for e in [first, last), zero for the rest of the tile.
template <typename T>
void load_keys(const AttentionTask &task, int64_t tile, int64_t first, int64_t last, float *keys) {
    const T *rows[kLanes];
    const T *cache = static_cast<const T *>(task.k_cache);
    for (int64_t e = tile; e < tile + kTile; e += kLanes, keys += kLanes) {
        for (int j = 0; j < kLanes; ++j) {
            const bool used = e + j >= first && e + j < last;
            rows[j] = used ? cache + slot_of(task, e + j) * task.slot_stride : nullptr;
        }
        for (int64_t i = 0; i < task.d; i += kLanes) {
            const int64_t n = task.d - i < kLanes ? task.d - i : kLanes;
            vf block[kLanes];
            for (int j = 0; j < kLanes; ++j) {
                block[j] = rows[j] == nullptr ? zero() : load_up_to(rows[j] + i, n);
            }
            transpose(block);
            for (int64_t j = 0; j < n; ++j) {
                store(keys + (i + j) * kTile, block[j]);
            }
        }
    }
}

// values[e - tile, :] = v of entry e for e in [first, last); columns from d to ldo are zero.
template <typename T>
void load_values(const AttentionTask &task, int64_t tile, int64_t first, int64_t last,
                 float *values) {
    const T *cache = static_cast<const T *>(task.v_cache);
    for (int64_t e = first; e < last; ++e) {
        float *row = values + (e - tile) * task.ldo;
        convert_row(row, cache + slot_of(task, e) * task.slot_stride, task.d);
        for (int64_t i = task.d; i < task.ldo; ++i) {
            row[i] = 0.0f;
        }
    }
}

inline void load_tile(const AttentionTask &task, int64_t tile, int64_t first, int64_t last,
                      const AttentionScratch &scratch) {
    switch (task.k_dtype) {
    case LLAISYS_DTYPE_F16:
        load_keys<f16_t>(task, tile, first, last, scratch.keys);
        break;
    case LLAISYS_DTYPE_BF16:
        load_keys<bf16_t>(task, tile, first, last, scratch.keys);
        break;
    default:
        load_keys<float>(task, tile, first, last, scratch.keys);
    }
    switch (task.v_dtype) {
    case LLAISYS_DTYPE_F16:
        return load_values<f16_t>(task, tile, first, last, scratch.values);
    case LLAISYS_DTYPE_BF16:
        return load_values<bf16_t>(task, tile, first, last, scratch.values);
    default:
        return load_values<float>(task, tile, first, last, scratch.values);
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
inline void add_values(const AttentionTask &task, const AttentionScratch &scratch, int64_t first,
                       int64_t n, Range range) {
    if (range.empty()) {
        return;
    }
    for (int64_t c = 0; c < task.ldo; c += kPanel) {
        panel<NoFetch>(n, scratch.scores + first * kTile + range.begin, kTile,
                     scratch.values + range.begin * task.ldo + c, task.ldo,
                     scratch.sums + first * task.ldo + c, task.ldo, range.end - range.begin);
    }
}

// The weighted sums of all rows. What all tokens see is done for all rows at once; what is before
// and after it for each token, so that no row meets a value that it does not see.
inline void sum_values(const AttentionTask &task, const AttentionScratch &scratch, int64_t tile) {
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
        add_values(task, scratch, t * task.group, task.group,
                   {seen.begin, smaller(seen.end, common.begin)});
    }
    add_values(task, scratch, 0, task.n_tokens * task.group, common);
    for (int64_t t = 0; t < task.n_tokens; ++t) {
        const Range seen = seen_of(task, t, tile);
        add_values(task, scratch, t * task.group, task.group,
                   {larger(seen.begin, common.end), seen.end});
    }
}

// total = total (+) part, row by row; factors are scratch of `rows` rounded up to 16.
inline void merge_states(const AttentionState &total, const AttentionState &part, int64_t rows,
                         int64_t ldo, float *old_factor, float *new_factor) {
    for_vectors(rows, [&](int64_t i, int64_t k) {
        const vf old_m = load_up_to(total.m + i, k);
        const vf new_m = load_up_to(part.m + i, k);
        const vf m = max_num(old_m, new_m);
        const vf safe = max_num(m, set1(-3.0e38f)); // both empty: exp(-inf - safe) is 0, not NaN
        store_up_to(old_factor + i, exp(sub(old_m, safe)), k);
        store_up_to(new_factor + i, exp(sub(new_m, safe)), k);
        store_up_to(total.m + i, m, k);
    });
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

inline void attention_tile(const AttentionTask &task, const AttentionScratch &scratch, int64_t tile,
                           int64_t first, int64_t last) {
    const int64_t rows = task.n_tokens * task.group;
    load_tile(task, tile, first, last, scratch);
    clear(scratch.scores, rows * kTile, 0.0f);
    clear(scratch.sums, rows * task.ldo, 0.0f);
    for (int64_t c = 0; c < kTile; c += kPanel) {
        panel<NoFetch>(rows, task.q, task.ldq, scratch.keys + c, kTile, scratch.scores + c, kTile,
                     task.d);
    }
    for (int64_t t = 0; t < task.n_tokens; ++t) {
        const Range seen = seen_of(task, t, tile);
        for (int64_t r = t * task.group; r < (t + 1) * task.group; ++r) {
            if (seen.empty()) {
                clear(scratch.scores + r * kTile, kTile, 0.0f);
                scratch.m[r] = -__builtin_inff();
                scratch.l[r] = 0.0f;
            } else {
                weigh_row(scratch.scores + r * kTile, seen, scratch.m[r], scratch.l[r]);
            }
        }
    }
    sum_values(task, scratch, tile);
}

inline void attention_span(const AttentionTask &task, const AttentionState &state, int64_t first,
                           int64_t last) {
    const AttentionScratch scratch(task);
    const int64_t rows = task.n_tokens * task.group;
    clear(state.m, rows, -__builtin_inff());
    clear(state.l, rows, 0.0f);
    clear(state.o, rows * task.ldo, 0.0f);
    const AttentionState part = {scratch.m, scratch.l, scratch.sums};
    for (int64_t tile = first / kTile * kTile; tile < last; tile += kTile) {
        attention_tile(task, scratch, tile, larger(first, tile), smaller(last, tile + kTile));
        merge_states(state, part, rows, task.ldo, scratch.old_factor, scratch.new_factor);
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
