// The register tile of linear and attention: a few rows of x times a panel of 32 columns. Every
// column is one lane that adds along k in order, so results do not depend on the tile shape.
// Compiled per instruction set.
#pragma once

#include "device/cpu/simd.hpp"
#include "ops/cpu/kernels.hpp"

namespace llaisys::LLAISYS_CPU_NS {

using ops::cpu::kPanel;

// Columns [c, c + kLanes) of one row of a panel, c < 16, and those 16 further.
inline vf load_low(const float *row, int c) { return load(row + c); }
inline vf load_high(const float *row, int c) { return load(row + 16 + c); }
inline vf load_low(const f16_t *row, int c) { return load(row + c); }
inline vf load_high(const f16_t *row, int c) { return load(row + 16 + c); }
inline vf load_low(const bf16_t *row, int c) { return low_halves(load_raw_pairs(row + 2 * c)); }
inline vf load_high(const bf16_t *row, int c) { return high_halves(load_raw_pairs(row + 2 * c)); }

// Addresses of the rows of a panel: at any stride, at that of a packed panel, or at individual
// offsets (with bf16 columns in natural order). high_aside is high, by load_aside where that pays.
template <typename T> struct DenseRows {
    const T *p;
    int64_t stride;
    vf low(int k, int c) const { return load_low(p + k * stride, c); }
    vf high(int k, int c) const { return load_high(p + k * stride, c); }
    vf high_aside(int k, int c) const {
        if constexpr (dtype_of<T>::value == LLAISYS_DTYPE_F16) {
            return load_aside(p + k * stride + 16 + c);
        }
        return high(k, c);
    }
    void advance(int k) { p += k * stride; }
};
template <typename T> struct PanelRows {
    const T *p;
    vf low(int k, int c) const { return load_low(p + k * kPanel, c); }
    vf high(int k, int c) const { return load_high(p + k * kPanel, c); }
    vf high_aside(int k, int c) const { return DenseRows<T>{p, kPanel}.high_aside(k, c); }
    void advance(int k) { p += k * kPanel; }
};
template <typename T> struct ListedRows {
    const T *p;
    const int64_t *offset; // of each row from p
    vf low(int k, int c) const { return load(p + offset[k] + c); }
    vf high(int k, int c) const { return load(p + offset[k] + 16 + c); }
    vf high_aside(int k, int c) const { return high(k, c); }
    void advance(int k) { offset += k; }
};

// Addresses of the rows of x: any stride, or a compile-time stride, which saves a register per row.
struct StridedRows {
    static constexpr int kStride = 0; // not a constant
    const float *p;
    int64_t stride;
    const float *row(int64_t r) const { return p + r * stride; }
    int64_t stride_bytes() const { return stride * int64_t(sizeof(float)); }
    StridedRows from(int64_t r) const { return {row(r), stride}; }
};
template <int stride> struct FixedRows {
    static constexpr int kStride = stride;
    const float *p;
    const float *row(int64_t r) const { return p + r * stride; }
    int64_t stride_bytes() const { return stride * int64_t(sizeof(float)); }
    FixedRows from(int64_t r) const { return {row(r)}; }
};

// Prefetch policy of a tile: some cache lines for every four k. `after` is the rest that is left to
// the next tile after one of `steps` steps.
struct NoFetch {
    void step() {}
    NoFetch after(int64_t) const { return {}; }
};

// A line of a stream of weights into L1, and one further ahead into L2: the few reads that L1 can have
// in flight do not use all of the bandwidth.
inline void prefetch_line(const char *line) {
    __builtin_prefetch(line, 0, 3);
    if constexpr (kFarStreamBytes > 0) {
        __builtin_prefetch(line + kFarStreamBytes, 0, 2);
    }
}

// `lines` lines per step: the weights that this tile needs next.
template <int lines> struct NearFetch {
    const char *next;
    void step() {
        for (int i = 0; i < lines; ++i) {
            prefetch_line(next + i * 64);
        }
        next += lines * 64;
    }
    NearFetch after(int64_t) const { return *this; }
};

// [next, end), evenly over the tiles of a block: the following block.
struct FarFetch {
    const char *next;
    const char *end;
    const char *due; // prefetched up to here by now
    int64_t pace;    // bytes per step
    void step() {
        due += pace;
        for (; next < due && next < end; next += 64) {
            prefetch_line(next);
        }
    }
    FarFetch after(int64_t steps) const {
        const char *later = due + steps * pace;
        return {next + (later - next + 63) / 64 * 64, end, later, pace};
    }
};

// `lines` lines of every `stride` bytes, without a branch: a part of the following block, the next
// part for the next tile.
template <int lines> struct LineFetch {
    const char *next;
    int64_t stride;
    void step() {
        for (int i = 0; i < lines; ++i) {
            prefetch_line(next + i * 64);
        }
        next += stride;
    }
    LineFetch after(int64_t) const { return {next + lines * 64, stride}; }
};

// The same x, opaque to the compiler, which would otherwise keep the broadcast value.
template <typename T> inline T *again(T *x) {
    asm("" : "+r"(x));
    return x;
}

// The rows of x of a tile, at the values from k on: a quad of each.
template <int rows, typename X, bool is_broadcast = broadcasts_rows(rows)> struct TileInput {
    X x;
    quad quads[rows];
    explicit TileInput(X from) : x(from) {}
    void load_four(int64_t k) {
#pragma GCC unroll 16
        for (int r = 0; r < rows; ++r) {
            quads[r] = load_quad(x.row(r) + k);
        }
    }
    void load_one(int64_t k) {
#pragma GCC unroll 16
        for (int r = 0; r < rows; ++r) {
            quads[r] = load_single(x.row(r) + k);
        }
    }
};

// The same for fma_broadcast. At a runtime stride three rows share a pointer: a pointer to every row
// would not fit in the registers.
template <int rows, typename X> struct TileInput<rows, X, true> {
    static constexpr int kShared = X::kStride == 0 ? 3 : rows;
    static constexpr int kPointers = (rows + kShared - 1) / kShared;
    const float *first[kPointers]; // of the rows that share a pointer
    const float *at[kPointers];
    int64_t stride; // bytes
    explicit TileInput(X x) : stride(x.stride_bytes()) {
        for (int i = 0; i < kPointers; ++i) {
            first[i] = x.row(i * kShared);
        }
    }
    void load_four(int64_t k) { load_one(k); }
    void load_one(int64_t k) {
        for (int i = 0; i < kPointers; ++i) {
            at[i] = first[i] + k;
        }
    }
    // sums += value `lane` of row r times low and high.
    template <int lane, int r> void multiply(vf &low_sum, vf &high_sum, vf low, vf high) const {
        constexpr int kRow = r % kShared;
        constexpr int kOffset = int(sizeof(float)) * (kRow * int(X::kStride) + lane);
        fma_broadcast<X::kStride == 0 ? kRow : 0, kOffset>(low_sum, high_sum, low, high,
                                                           at[r / kShared], stride);
    }
};

template <int rows, int pairs> struct Accumulators {
    vf low[rows][pairs];
    vf high[rows][pairs];
};

// Products of value `lane` of the rows from r on with two vectors of w.
template <int lane, int p, int r = 0, int rows, int pairs, typename X>
inline __attribute__((always_inline)) void multiply_rows(Accumulators<rows, pairs> &sums,
                                                         const X &x, vf low, vf high) {
    if constexpr (r < rows) {
        x.template multiply<lane, r>(sums.low[r][p], sums.high[r][p], low, high);
        multiply_rows<lane, p, r + 1>(sums, x, low, high);
    }
}

// One k, index `k` relative to w: products with value `lane` of each row of x, pairs from p on.
template <int lane, int p = 0, int rows, int pairs, typename X, typename W>
inline __attribute__((always_inline)) void tile_step(Accumulators<rows, pairs> &sums,
                                                     const TileInput<rows, X> &x, const W &w, int k,
                                                     int column) {
    const int c = column + p * kLanes;
    if constexpr (rows <= kTileRows) {
        const vf low = w.low(k, c);
        // One row is bound by conversion: part of it uses otherwise idle units.
        const vf high = rows == 1 && p == 0 ? w.high_aside(k, c) : w.high(k, c);
        if constexpr (broadcasts_rows(rows)) {
            multiply_rows<lane, p>(sums, x, low, high);
        } else {
#pragma GCC unroll 16
            for (int r = 0; r < rows; ++r) {
                sums.low[r][p] = fma_lane<lane>(low, x.quads[r], sums.low[r][p]);
                sums.high[r][p] = fma_lane<lane>(high, x.quads[r], sums.high[r][p]);
            }
        }
    } else { // sums fill all registers except one of w and one of x
        const vf low = w.low(k, c);
#pragma GCC unroll 16
        for (int r = 0; r < rows; ++r) {
            sums.low[r][p] = fma_lane<lane>(low, x.quads[r], sums.low[r][p]);
        }
        const vf high = w.high(k, c);
#pragma GCC unroll 16
        for (int r = 0; r < rows; ++r) {
            sums.high[r][p] = fma_lane<lane>(high, again(x.quads[r]), sums.high[r][p]);
        }
    }
    if constexpr (p + 1 < pairs) {
        tile_step<lane, p + 1>(sums, x, w, k, column);
    }
}

// Initial value of a tile's sums: zero, or the contents of acc.
enum class Start { zero, sums };

// acc[r, c] (+)= sum over k of x[r, k] * w[k, c] for the columns [column, column + pairs * kLanes)
// and those 16 further. Rows of acc are lda apart.
template <int rows, int pairs, Start start, typename X, typename W, typename F>
void tile(X x, W w, float *acc, int64_t lda, int64_t k, int column, F fetch) {
    Accumulators<rows, pairs> sums;
#pragma GCC unroll 16
    for (int r = 0; r < rows; ++r) {
#pragma GCC unroll 8
        for (int p = 0; p < pairs; ++p) {
            float *place = acc + r * lda + column + p * kLanes;
            sums.low[r][p] = start == Start::zero ? zero() : load(place);
            sums.high[r][p] = start == Start::zero ? zero() : load(place + 16);
        }
    }
    TileInput<rows, X> xs(x);
    int64_t i = 0;
    for (; i + 4 <= k; i += 4) {
        fetch.step();
        xs.load_four(i);
        tile_step<0>(sums, xs, w, 0, column);
        tile_step<1>(sums, xs, w, 1, column);
        tile_step<2>(sums, xs, w, 2, column);
        tile_step<3>(sums, xs, w, 3, column);
        w.advance(4);
    }
    for (; i < k; ++i, w.advance(1)) {
        xs.load_one(i);
        tile_step<0>(sums, xs, w, 0, column);
    }
#pragma GCC unroll 16
    for (int r = 0; r < rows; ++r) {
#pragma GCC unroll 8
        for (int p = 0; p < pairs; ++p) {
            float *place = acc + r * lda + column + p * kLanes;
            store(place, sums.low[r][p]);
            store(place + 16, sums.high[r][p]);
        }
    }
}

// Number of adjacent tiles of a panel for this many rows.
constexpr int64_t tiles_across(int64_t rows) { return kPanel / (tile_vectors(int(rows)) * kLanes); }

// A whole panel for `n` <= kMaxTileRows rows. Returns the remaining prefetch.
template <Start start, int rows = kMaxTileRows, typename X, typename W, typename F>
inline F panel_rows(int64_t n, X x, const W &w, float *acc, int64_t lda, int64_t k, F fetch) {
    if constexpr (rows > 1) {
        if (n < rows) {
            return panel_rows<start, rows - 1>(n, x, w, acc, lda, k, fetch);
        }
    }
    constexpr int pairs = tile_vectors(rows) / 2;
    for (int column = 0; column < 16; column += pairs * kLanes) {
        tile<rows, pairs, start>(x, w, acc, lda, k, column, fetch);
        fetch = fetch.after(k / 4);
    }
    return fetch;
}

// Calls f(first, n) for register tiles that cover m rows.
template <typename F> inline void for_row_tiles(int64_t m, const F &f) {
    for (int64_t first = 0; first < m;) {
        const int64_t n = tile_height(m - first);
        f(first, n);
        first += n;
    }
}

// Output lines of the rows of a panel, prefetched for writing; p null: none.
struct OutputLines {
    const char *p;
    int64_t stride; // bytes between rows
    int64_t bytes;  // of a row

    void prefetch(int64_t first, int64_t n) const {
        for (int64_t r = first; p != nullptr && r < first + n; ++r) {
            for (int64_t at = 0; at < bytes; at += 64) {
                __builtin_prefetch(p + r * stride + at, 1, 3);
            }
        }
    }
};

// A whole panel for any number of rows. Each tile prefetches the lines that its sums are written to.
template <typename X, typename W, typename F>
void panel(int64_t m, X x, const W &w, float *acc, int64_t lda, int64_t k, F fetch,
           const OutputLines &lines) {
    for_row_tiles(m, [&](int64_t first, int64_t n) {
        lines.prefetch(first, n);
        fetch = panel_rows<Start::sums>(n, x.from(first), w, acc + first * lda, lda, k, fetch);
    });
}

} // namespace llaisys::LLAISYS_CPU_NS
