// The two products of LoRA for a few rows of one adapter: t = scale * A x, then out += B t. Every
// output sums in one order for any register tile. Compiled per instruction set.
#pragma once

#include "ops/cpu/row_kernels.hpp"

namespace llaisys::LLAISYS_CPU_NS {

// Register tiles; sixteen vector registers with eight lanes.
constexpr int kLoraRows = kLanes == 8 ? 2 : 4;
constexpr int kLoraColumns = 4; // ranks, or vectors of outputs

// load_some with a bound that the compiler can see: n < kLanes.
template <typename T> inline vf load_tail(const T *p, int64_t n) {
    T buffer[kLanes] = {};
    for (int i = 0; i + 1 < kLanes; ++i) {
        if (i < n) {
            buffer[i] = p[i];
        }
    }
    return load(buffer);
}

// M rows from i on, R ranks from r on. Each sum is one vector accumulator along k.
template <int M, int R, typename T>
void lora_shrink_tile(const ops::cpu::LoraTask &task, int64_t i, int64_t r) {
    const float *x[M];
    const T *a[R];
    vf sums[M][R];
    for (int row = 0; row < M; ++row) {
        x[row] = task.x + task.rows[i + row] * task.ldx;
        for (int c = 0; c < R; ++c) {
            sums[row][c] = zero();
        }
    }
    for (int c = 0; c < R; ++c) {
        a[c] = static_cast<const T *>(task.w) + (r + c) * task.ldw;
    }
    for_vectors(task.n, [&](int64_t k, int64_t n) {
        vf weights[R];
        for (int c = 0; c < R; ++c) {
            weights[c] = n == kLanes ? load(a[c] + k) : load_tail(a[c] + k, n);
        }
        for (int row = 0; row < M; ++row) {
            const vf values = n == kLanes ? load(x[row] + k) : load_tail(x[row] + k, n);
            for (int c = 0; c < R; ++c) {
                sums[row][c] = fma(values, weights[c], sums[row][c]);
            }
        }
    });
    for (int row = 0; row < M; ++row) {
        for (int c = 0; c < R; ++c) {
            task.t[(i + row) * task.ldt + r + c] = reduce_add(sums[row][c]) * task.scale;
        }
    }
}

template <int M, typename T> void lora_shrink_rows(const ops::cpu::LoraTask &task, int64_t i) {
    int64_t r = 0;
    for (; r + kLoraColumns <= task.rank; r += kLoraColumns) {
        lora_shrink_tile<M, kLoraColumns, T>(task, i, r);
    }
    for (; r < task.rank; ++r) {
        lora_shrink_tile<M, 1, T>(task, i, r);
    }
}

template <typename T> void lora_shrink(const ops::cpu::LoraTask &task) {
    int64_t i = 0;
    for (; i + kLoraRows <= task.m; i += kLoraRows) {
        lora_shrink_rows<kLoraRows, T>(task, i);
    }
    for (; i < task.m; ++i) {
        lora_shrink_rows<1, T>(task, i);
    }
}

// M rows from i on, V vectors of outputs from column j on, of which the last has `last` lanes.
template <int M, int V, typename T>
void lora_expand_tile(const ops::cpu::LoraTask &task, int64_t i, int64_t j, int64_t last) {
    vf sums[M][V];
    for (int row = 0; row < M; ++row) {
        for (int v = 0; v < V; ++v) {
            sums[row][v] = zero();
        }
    }
    const T *b = static_cast<const T *>(task.w) + j;
    for (int64_t r = 0; r < task.rank; ++r, b += task.ldw) {
        vf weights[V];
        for (int v = 0; v < V; ++v) {
            weights[v] = load_up_to(b + v * kLanes, v + 1 < V ? kLanes : last);
        }
        for (int row = 0; row < M; ++row) {
            const vf t = set1(task.t[(i + row) * task.ldt + r]);
            for (int v = 0; v < V; ++v) {
                sums[row][v] = fma(t, weights[v], sums[row][v]);
            }
        }
    }
    for (int row = 0; row < M; ++row) {
        float *out = task.out + task.rows[i + row] * task.ldo + j;
        for (int v = 0; v < V; ++v, out += kLanes) {
            const int64_t n = v + 1 < V ? kLanes : last;
            store_up_to(out, add(load_up_to(out, n), sums[row][v]), n);
        }
    }
}

template <int M, typename T> void lora_expand_rows(const ops::cpu::LoraTask &task, int64_t i) {
    int64_t j = 0;
    for (; j + kLoraColumns * kLanes <= task.n; j += kLoraColumns * kLanes) {
        lora_expand_tile<M, kLoraColumns, T>(task, i, j, kLanes);
    }
    for_vectors(task.n - j,
                [&](int64_t at, int64_t n) { lora_expand_tile<M, 1, T>(task, i, j + at, n); });
}

template <typename T> void lora_expand(const ops::cpu::LoraTask &task) {
    int64_t i = 0;
    for (; i + kLoraRows <= task.m; i += kLoraRows) {
        lora_expand_rows<kLoraRows, T>(task, i);
    }
    for (; i < task.m; ++i) {
        lora_expand_rows<1, T>(task, i);
    }
}

} // namespace llaisys::LLAISYS_CPU_NS
