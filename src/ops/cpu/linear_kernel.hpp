// Linear over packed panels. Few rows widen the weights in registers; many rows widen a K block of
// the panel once and reuse it. Compiled per instruction set.
#pragma once

#include "ops/cpu/row_kernels.hpp"
#include "ops/cpu/tile.hpp"

namespace llaisys::LLAISYS_CPU_NS {

inline void widen_block(float *out, const float *in, int64_t k) {
    convert_row(out, in, k * kPanel);
}
inline void widen_block(float *out, const f16_t *in, int64_t k) {
    convert_row(out, in, k * kPanel);
}
inline void widen_block(float *out, const bf16_t *in, int64_t k) {
    for (int64_t i = 0; i < k; ++i, out += kPanel, in += kPanel) {
        for (int c = 0; c < 16; c += kLanes) {
            store(out + c, load_low(in, c));
            store(out + 16 + c, load_high(in, c));
        }
    }
}

// Results of a panel without bias: at(r, c) is those of row r, columns [c, c + kLanes).
struct FloatSums {
    const float *acc; // [m, 32]
    vf at(int64_t r, int64_t c) const { return load(acc + r * kPanel + c); }
};

// Adds the bias and writes n columns of m rows to out.
template <typename Out, typename Sums>
void write_rows(Out *out, int64_t ldo, const Sums &sums, const float *bias, int64_t m, int64_t n) {
    for (int64_t r = 0; r < m; ++r, out += ldo) {
        for_vectors(n, [&](int64_t c, int64_t k) {
            const vf sum = sums.at(r, c);
            store_up_to(out + c, bias == nullptr ? sum : add(sum, load(bias + c)), k);
        });
    }
}

// Bias of the columns [first, first + n) as f32, in `wide`; null without a bias.
inline const float *read_bias(const ops::cpu::LinearTask &task, int64_t first, int64_t n,
                              float *wide) {
    if (task.bias == nullptr) {
        return nullptr;
    }
    switch (task.bias_dtype) {
    case LLAISYS_DTYPE_F16:
        convert_row(wide, static_cast<const f16_t *>(task.bias) + first, n);
        break;
    case LLAISYS_DTYPE_BF16:
        convert_row(wide, static_cast<const bf16_t *>(task.bias) + first, n);
        break;
    case LLAISYS_DTYPE_F32:
        convert_row(wide, static_cast<const float *>(task.bias) + first, n);
        break;
    default:
        ops::cpu::no_rows(task.bias_dtype);
    }
    return wide;
}

// Panel p of the task. Not inlined: it would grow every kernel by all dtypes.
template <typename Sums>
__attribute__((noinline)) void finish_panel(const ops::cpu::LinearTask &task, int64_t p,
                                            const Sums &sums) {
    const int64_t first = p * kPanel;
    const int64_t n = task.n - first < kPanel ? task.n - first : kPanel;
    alignas(64) float wide[kPanel] = {};
    const float *bias = read_bias(task, first, n, wide);
    switch (task.out_dtype) {
    case LLAISYS_DTYPE_F16:
        return write_rows(static_cast<f16_t *>(task.out) + first, task.ldo, sums, bias, task.m, n);
    case LLAISYS_DTYPE_BF16:
        return write_rows(static_cast<bf16_t *>(task.out) + first, task.ldo, sums, bias, task.m, n);
    case LLAISYS_DTYPE_F32:
        return write_rows(static_cast<float *>(task.out) + first, task.ldo, sums, bias, task.m, n);
    default:
        ops::cpu::no_rows(task.out_dtype);
    }
}

// The output lines of panel p of the task.
inline OutputLines output_lines(const ops::cpu::LinearTask &task, int64_t p) {
    const int64_t size = task.out_dtype == LLAISYS_DTYPE_F32 ? 4 : 2;
    const int64_t first = p * kPanel;
    const int64_t n = task.n - first < kPanel ? task.n - first : kPanel;
    return {static_cast<const char *>(task.out) + first * size, task.ldo * size, n * size};
}

// acc [m, 32] += x[:, k...] * one K block of a panel, kc values of k.
template <typename T>
inline void add_block(const ops::cpu::LinearTask &task, const T *w, int64_t k, int64_t kc,
                      float *acc, float *wide, const OutputLines &lines) {
    constexpr int64_t bytes = 4 * kPanel * int64_t(sizeof(T)); // of four k, one step
    const StridedRows x = {task.x + k, task.ldx};
    const PanelRows<T> packed = {w};
    int64_t tiles = 0;
    int64_t passes = 0;
    for_row_tiles(task.m, [&](int64_t, int64_t n) {
        ++tiles;
        passes += tiles_across(n);
    });
    if (passes == 1) { // the block is read once, as a stream
        const char *soon = reinterpret_cast<const char *>(w) + kStreamBytes;
        panel(task.m, x, packed, acc, kPanel, kc, NearFetch<int(bytes / 64)>{soon}, lines);
        return;
    }
    const char *next = reinterpret_cast<const char *>(w + kc * kPanel);
    const char *end = reinterpret_cast<const char *>(w + 2 * kc * kPanel);
    const FarFetch fetch = {next, end, next, (bytes + passes - 1) / passes};
    if (sizeof(T) == sizeof(float) || tiles <= kDirectTiles) {
        panel(task.m, x, packed, acc, kPanel, kc, fetch, lines);
    } else {
        widen_block(wide, w, kc);
        panel(task.m, x, PanelRows<float>{wide}, acc, kPanel, kc, fetch, lines);
    }
}

template <typename T> void linear(const ops::cpu::LinearTask &task) {
    alignas(64) float acc[ops::cpu::kLinearRows * kPanel];
    alignas(64) float wide[kBlockK * kPanel];
    const int64_t panels = (task.n + kPanel - 1) / kPanel;
    const int64_t blocks = (task.k + kBlockK - 1) / kBlockK;
    const int64_t kb = ops::cpu::round_up((task.k + blocks - 1) / (blocks > 0 ? blocks : 1), 4);
    for (int64_t p = 0; p < panels; ++p) {
        const T *w = static_cast<const T *>(task.w) + p * task.k * kPanel;
        for (int64_t i = 0; i < task.m * kPanel; ++i) {
            acc[i] = 0.0f;
        }
        for (int64_t k = 0; k < task.k; k += kb) {
            const bool is_last = task.k - k <= kb;
            add_block(task, w + k * kPanel, k, is_last ? task.k - k : kb, acc, wide,
                      is_last ? output_lines(task, p) : OutputLines{});
        }
        finish_panel(task, p, FloatSums{acc});
    }
}

} // namespace llaisys::LLAISYS_CPU_NS
