// Attention of some rows over one span of entries, tile by tile, with an online softmax (running
// maximum per row). A few rows at a time go from scores to sums while a tile is in L1. Included
// after one attention_*_keys.hpp, which defines load_keys, score_rows and kScoresAreScaled, and one
// attention_*_values.hpp, which defines load_values, exp_weight, store_weights, sum_rows and
// (itself or by what it includes before) RowTiles. Compiled per instruction set.
#pragma once

#include "ops/cpu/attention_tile.hpp"

namespace llaisys::LLAISYS_CPU_NS {

inline void load_tile(const AttentionTask &task, const TilePlaces &places,
                      AttentionScratch &scratch, TileFetch &fetch) {
    if (has_scales(task)) {
        if constexpr (!kScoresAreScaled) {
            load_scales(task.k_cache, places, task.d, scratch.k_scales);
        }
        load_scales(task.v_cache, places, task.d, scratch.v_scales);
    }
    load_keys(task, places, scratch.keys, fetch);
    load_values(task, places, scratch, fetch);
}

// Scores that the row does not see become -infinity.
inline void hide_scores(float *scores, Range seen) {
    for (int64_t i = 0; i < kTile; i += kLanes) {
        const vf kept =
            keep_lanes(load(scores + i), seen.begin - i, seen.end - i, set1(-__builtin_inff()));
        store(scores + i, kept);
    }
}

// The row's maxima by lane, ignoring NaN.
inline vf largest_scores(const float *scores) {
    vf best = set1(-__builtin_inff());
#pragma GCC unroll 16
    for (int i = 0; i < kTile; i += kLanes) {
        best = max_num(load(scores + i), best);
    }
    return best;
}

// In place of scores: exp(scores - m) * v_scales (if any), as store_weights stores them; weights
// [kLanes] = weights * factor + the sum of the exponentials.
template <bool is_scaled>
inline __attribute__((always_inline)) void weigh_row(float *scores, float m, float factor,
                                                     const float *v_scales, float *weights) {
    static_assert(kTile % (2 * kLanes) == 0);
    vf sums[2] = {zero(), zero()};
#pragma GCC unroll 8
    for (int i = 0; i < kTile; i += 2 * kLanes) {
        vf weight[2];
        for (int j = 0; j < 2; ++j) {
            weight[j] = exp_weight(sub(load(scores + i + j * kLanes), set1(m)));
            sums[j] = add(sums[j], weight[j]);
            if constexpr (is_scaled) {
                weight[j] = mul(weight[j], load(v_scales + i + j * kLanes));
            }
        }
        store_weights(scores, i, weight[0], weight[1]);
    }
    store(weights, fma(load(weights), set1(factor), add(sums[0], sums[1])));
}

constexpr int64_t kWeighSteps = 2; // prefetch steps of the softmax of a row
constexpr int64_t kAwakeRows = 8;  // between two calls of keep_awake

// A row's maximum is replaced only by one that exceeds it by more than this: weights up to e^8 instead
// of 1 are as accurate, and the sums are rarely rescaled.
constexpr float kMaxSlack = 8.0f;

// Running maxima of the rows of a row tile, and the factors of what was added relative to the old ones;
// 1 where nothing was.
struct RowMaxima {
    alignas(64) float m[ops::cpu::kMaxRowTile];
    alignas(64) float factor[ops::cpu::kMaxRowTile];

    // Updates state.m for rows [first, first + n), n <= kLanes. Hides the scores that a row does not see.
    void find(const AttentionTask &task, const AttentionState &state, const RowTile &rows,
              float *scores, int64_t first, int64_t n) {
        vf best[kLanes];
        for (int64_t r = 0; r < kLanes; ++r) {
            best[r] = set1(-__builtin_inff());
        }
        for (int64_t r = 0; r < n; ++r) {
            float *row = scores + (first + r) * kTile;
            if (!rows.sees_all()) {
                hide_scores(row, rows.seen_by_row(task, first + r));
            }
            best[r] = largest_scores(row);
        }
        float *state_m = state.m + rows.first + first;
        const vf old_m = load(state_m);
        const vf largest = reduce_max_each(best);
        const vf new_m = select_greater(largest, add(old_m, set1(kMaxSlack)), largest, old_m);
        store_up_to(state_m, new_m, n);
        store(m + first, new_m);
        const vf none = set1(-__builtin_inff());
        store(factor + first,
              select_greater(old_m, none, exp_below_88(sub(old_m, new_m)), set1(1.0f)));
    }
};

// Converts the scores of a row tile to weights and rescales the sums accumulated so far.
template <bool is_scaled>
inline void apply_maxima(const AttentionTask &task, const AttentionScratch &scratch,
                         const AttentionState &state, const RowTile &rows, const RowMaxima &maxima,
                         TileFetch &fetch) {
    for (int64_t r = 0; r < rows.n; ++r) {
        const int64_t row = rows.first + r;
        const float factor = maxima.factor[r];
        fetch.step(kWeighSteps);
        if (r % kAwakeRows == 0) {
            RowTiles::keep_awake();
        }
        weigh_row<is_scaled>(scratch.scores + r * kTile, maxima.m[r], factor, scratch.v_scales,
                             scratch.weights + row * kLanes);
        if (factor != 1.0f) {
            scale_in_place(state.o + row * task.ldo, factor, task.ldo);
        }
    }
}

inline void weigh_rows(const AttentionTask &task, const AttentionScratch &scratch,
                       const AttentionState &state, const RowTile &rows, TileFetch &fetch) {
    RowMaxima maxima;
    for (int64_t r = 0; r < rows.n; r += kLanes) {
        maxima.find(task, state, rows, scratch.scores, r, smaller(rows.n - r, kLanes));
    }
    has_scales(task) ? apply_maxima<true>(task, scratch, state, rows, maxima, fetch)
                     : apply_maxima<false>(task, scratch, state, rows, maxima, fetch);
}

// First token from t on for which "attends to the tile" equals `wanted`; n_tokens if none.
inline int64_t next_token(const AttentionTask &task, int64_t tile, int64_t t, bool wanted) {
    while (t < task.n_tokens && seen_by(task, t, tile).empty() == wanted) {
        ++t;
    }
    return t;
}

// Prefetch steps of a tile, all heads together.
inline int64_t fetch_steps(const AttentionTask &task) {
    const int64_t rows = task.n_tokens * task.group;
    const int64_t height = RowTiles::height(rows);
    const int64_t tiles = (rows + height - 1) / height;
    const int64_t of_tile = score_steps(height, task.d) + value_steps(height, task.ldo);
    return task.n_heads * (load_steps(task.d) + tiles * of_tile + rows * kWeighSteps);
}

// Adds one tile to the state.
inline void attention_tile(const AttentionTask &task, AttentionScratch &scratch,
                           const AttentionState &state, const TilePlaces &places, RowTiles &tiles,
                           TileFetch &fetch) {
    load_tile(task, places, scratch, fetch);
    int64_t token = next_token(task, places.tile, 0, true);
    while (token < task.n_tokens) {
        const int64_t end = next_token(task, places.tile, token, false);
        for (int64_t row = token * task.group; row < end * task.group;) {
            const int64_t n = RowTiles::height(end * task.group - row);
            const RowTile rows(task, places.tile, row, n);
            score_rows(task, places, scratch.keys, rows, scratch.scores, tiles, fetch);
            if (!kScoresAreScaled && has_scales(task)) {
                scale_rows(scratch.scores, n, scratch.k_scales);
            }
            if (task.soft_cap != 0) {
                soft_cap_row(scratch.scores, task.soft_cap, n * kTile);
            }
            weigh_rows(task, scratch, state, rows, fetch);
            sum_rows(task, scratch, state, places, rows, tiles, fetch);
            row += n;
        }
        token = next_token(task, places.tile, end, true);
    }
}

inline void fill(float *p, int64_t n, float value) {
    for (int64_t i = 0; i < n; ++i) {
        p[i] = value;
    }
}

// The task of KV head h.
inline AttentionTask head_of(const AttentionTask &task, int64_t h) {
    const auto at = [&](const void *cache, DType dtype) {
        return static_cast<const char *>(cache) + h * task.head_stride * bytes_of(dtype);
    };
    AttentionTask head = task;
    head.n_heads = 1;
    head.q += h * task.n_tokens * task.group * task.ldq;
    head.k_cache = at(task.k_cache, task.k_dtype);
    head.v_cache = at(task.v_cache, task.v_dtype);
    return head;
}

// The task whose entries follow those of tile `tile`, to be prefetched, and its tile after it in
// `places`: the next tile, or the first one of the next task.
inline AttentionTask find_next(const AttentionTask &task, int64_t tile, TilePlaces *places) {
    AttentionTask following = task;
    int64_t begin = smaller(task.limit, tile + kTile);
    int64_t end = task.limit;
    if (begin == end && task.next.table != nullptr) {
        following.table = task.next.table;
        following.k_cache = task.next.k_cache;
        following.v_cache = task.next.v_cache;
        begin = task.next.begin;
        end = task.next.end;
    }
    const int64_t next_tile = begin / kTile * kTile;
    places->find(following, next_tile, begin, smaller(end, next_tile + kTile));
    return following;
}

inline void attention_span(const AttentionTask &task, const AttentionState &state, int64_t first,
                           int64_t last) {
    AttentionScratch scratch(task);
    const int64_t rows = task.n_tokens * task.group;
    float *weights = scratch.weights;
    for (int64_t h = 0; h < task.n_heads; ++h) {
        const AttentionState of_head = state.after(h * task.state_stride);
        fill(of_head.m, ops::cpu::round_up(rows, 16), -__builtin_inff());
        fill(of_head.o, rows * task.ldo, 0.0f);
    }
    fill(weights, task.n_heads * rows * kLanes, 0.0f);
    TilePlaces places[2];
    RowTiles tiles(rows);
    int64_t tile = first / kTile * kTile;
    places[0].find(task, tile, first, smaller(last, tile + kTile));
    for (int turn = 0; tile < last; tile += kTile, turn = 1 - turn) {
        TilePlaces &next = places[1 - turn];
        TileFetch fetch(find_next(task, tile, &next), next, fetch_steps(task));
        for (int64_t h = 0; h < task.n_heads; ++h) {
            scratch.weights = weights + h * rows * kLanes;
            attention_tile(head_of(task, h), scratch, state.after(h * task.state_stride),
                           places[turn], tiles, fetch);
        }
        next.last = smaller(next.last, last);
    }
    for (int64_t h = 0; h < task.n_heads; ++h) {
        float *l = state.after(h * task.state_stride).l;
        for (int64_t r = 0; r < rows; ++r) {
            l[r] = reduce_add(load(weights + (h * rows + r) * kLanes));
        }
    }
}

// Merges part into total for n <= 16 rows.
inline void merge_rows(const AttentionState &total, const AttentionState &part, int64_t n,
                       int64_t ldo) {
    alignas(64) float old_factor[16];
    alignas(64) float new_factor[16];
    for (int64_t i = 0; i < n; i += kLanes) { // m is padded to whole vectors
        const vf old_m = load(total.m + i);
        const vf new_m = load(part.m + i);
        const vf m = max_num(old_m, new_m);
        const vf safe = max_num(m, set1(-3.0e38f)); // both empty: exp(-inf - safe) is 0, not NaN
        store(old_factor + i, exp_below_88(sub(old_m, safe)));
        store(new_factor + i, exp_below_88(sub(new_m, safe)));
        store(total.m + i, m);
    }
    for (int64_t r = 0; r < n; ++r) {
        if (part.l[r] == 0.0f) { // no visible entry
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

inline void attention_merge(const AttentionState &total, const AttentionState &part, int64_t rows,
                            int64_t ldo) {
    for (int64_t first = 0; first < rows; first += 16) {
        merge_rows({total.m + first, total.l + first, total.o + first * ldo},
                   {part.m + first, part.l + first, part.o + first * ldo},
                   smaller(16, rows - first), ldo);
    }
}

} // namespace llaisys::LLAISYS_CPU_NS
