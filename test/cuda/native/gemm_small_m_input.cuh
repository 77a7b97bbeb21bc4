// Rows of x for the small-M GEMM checks, on host and device.
#pragma once

#include "common.cuh"

namespace check {

using llaisys::ops::cuda::GemmInput;

// 16-bit rows, or f32 rows of which `chosen` are normalized.
template <typename T> struct Input {
    int m, k;
    bool norms;
    std::vector<float> residual; // [2 m, k]
    std::vector<float> scale;    // [k]
    std::vector<int32_t> chosen; // [m]
    std::vector<T> x;            // [m, ldx]
    int64_t ldx;
    Array<float> on_residual, on_scale;
    Array<int32_t> on_chosen;
    Array<T> on_x;
    std::vector<double> exact; // [m, k]: the GEMM operand

    Input(int m, int k, bool norms, unsigned seed)
        : m(m), k(k), norms(norms), residual(normal<float>(size_t(2 * m) * k, seed)),
          scale(normal<float>(size_t(k), seed + 1)), chosen(size_t(m)),
          x(normal<T>(size_t(m) * (k + 8), seed + 2)), ldx(k + 8), on_residual(residual),
          on_scale(scale), on_chosen(size_t(m)), on_x(x), exact(size_t(m) * k) {
        for (int r = 0; r < m; ++r) {
            chosen[size_t(r)] = (r * 5 + 1) % (2 * m);
        }
        on_chosen.put(chosen);
        for (int r = 0; r < m; ++r) {
            const float *row = residual.data() + size_t(chosen[size_t(r)]) * k;
            double sum = 0;
            for (int i = 0; i < k; ++i) {
                sum += double(row[i]) * row[i];
            }
            const float factor = 1.0f / std::sqrt(float(sum / k) + 1e-6f);
            for (int i = 0; i < k; ++i) {
                exact[size_t(r) * k + i] =
                    norms ? double(host_float(host_value<T>(row[i] * factor * scale[size_t(i)])))
                          : double(host_float(x[size_t(r * ldx) + i]));
            }
        }
    }
    GemmInput few(int first, int count) const {
        GemmInput in{};
        in.m = count;
        in.k = k;
        if (norms) {
            in.residual = on_residual.get();
            in.ld_residual = k;
            in.rows = on_chosen.get() + first;
            in.norm_weight = on_scale.get();
            in.epsilon = 1e-6f;
        } else {
            in.x = on_x.get() + first * ldx;
            in.ldx = ldx;
        }
        return in;
    }
    std::vector<double> times(const std::vector<T> &w, int n) const { // [m, n]
        std::vector<float> wide(w.size());
        for (size_t i = 0; i < w.size(); ++i) {
            wide[i] = host_float(w[i]);
        }
        std::vector<double> out(size_t(m) * n);
        for (int r = 0; r < m; ++r) {
            for (int o = 0; o < n; ++o) {
                double sum = 0;
                for (int i = 0; i < k; ++i) {
                    sum += exact[size_t(r) * k + i] * double(wide[size_t(o) * k + i]);
                }
                out[size_t(r) * n + o] = sum;
            }
        }
        return out;
    }
};

} // namespace check
