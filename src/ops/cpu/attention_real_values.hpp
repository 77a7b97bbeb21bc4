// Weighted sums of values in f32: register tiles that add along the entries in order. Compiled per
// instruction set.
#pragma once

#include "ops/cpu/attention_tile.hpp"

namespace llaisys::LLAISYS_CPU_NS {

using RowTiles = VectorRows;

// Prefetch steps of sum_rows for n rows.
inline int64_t value_steps(int64_t n, int64_t ldo) {
    return ldo / kPanel * tiles_across(n) * (kTile / 4);
}

inline vf exp_weight(vf x) { return exp_below_88(x); }
inline void store_weights(float *row, int64_t e, vf low, vf high) {
    store(row + e, low);
    store(row + e + kLanes, high);
}

inline void load_values(const AttentionTask &task, const TilePlaces &places,
                        const AttentionScratch &scratch, TileFetch &) {
    if (!is_direct(task)) {
        widen_entries(task.v_cache, task.v_dtype, places, places.first - places.tile,
                      places.last - places.tile, task.value_dim, task.ldo, scratch.values);
    }
}

// o[row, c...] += weights[row, e] * values[e, c...] for rows [first, first + n) of the row tile
// over the entries of `range`, a panel of columns.
template <typename W>
inline void add_panel(const AttentionTask &task, const AttentionScratch &scratch,
                      const AttentionState &state, const RowTile &rows, int64_t first, int64_t n,
                      Range range, int64_t c, const W &values, TileFetch &fetch) {
    const FixedRows<kTile> weights = {scratch.scores + first * kTile + range.begin};
    panel_rows<Start::sums>(n, weights, values, state.o + (rows.first + first) * task.ldo + c,
                            task.ldo, range.end - range.begin, SharedFetch{&fetch});
}

inline void add_values(const AttentionTask &task, const AttentionScratch &scratch,
                       const AttentionState &state, const TilePlaces &places, const RowTile &rows,
                       int64_t first, int64_t n, Range range, TileFetch &fetch) {
    if (range.empty()) {
        return;
    }
    for (int64_t c = 0; c < task.ldo; c += kPanel) {
        const auto add = [&](const auto &values) {
            add_panel(task, scratch, state, rows, first, n, range, c, values, fetch);
        };
        if (is_direct(task)) {
            visit_cache(task.v_cache, task.v_dtype, [&](auto *cache) {
                using T = std::remove_const_t<std::remove_pointer_t<decltype(cache)>>;
                add(ListedRows<T>{cache + c, places.offset + range.begin});
            });
        } else {
            add(DenseRows<float>{scratch.values + range.begin * task.ldo + c, task.ldo});
        }
    }
}

// Weighted sums of the values. Entries visible to all rows are processed for all rows at once, the
// others row by row, so that no row reads a masked value.
inline void sum_rows(const AttentionTask &task, const AttentionScratch &scratch,
                     const AttentionState &state, const TilePlaces &places, const RowTile &rows,
                     RowTiles &, TileFetch &fetch) {
    const Range common = rows.common.empty() ? Range{kTile, kTile} : rows.common;
    for (int64_t r = 0; !rows.is_same && r < rows.n; ++r) {
        const Range seen = rows.seen_by_row(task, r);
        add_values(task, scratch, state, places, rows, r, 1,
                   {seen.begin, smaller(seen.end, common.begin)}, fetch);
    }
    add_values(task, scratch, state, places, rows, 0, rows.n, common, fetch);
    for (int64_t r = 0; !rows.is_same && r < rows.n; ++r) {
        const Range seen = rows.seen_by_row(task, r);
        add_values(task, scratch, state, places, rows, r, 1,
                   {larger(seen.begin, common.end), seen.end}, fetch);
    }
}

} // namespace llaisys::LLAISYS_CPU_NS
