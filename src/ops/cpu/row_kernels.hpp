// Kernels over one row of f32 values; contracts in kernels.hpp. Compiled per instruction set.
#pragma once

#include "device/cpu/simd.hpp"
#include "ops/cpu/kernels.hpp"

namespace llaisys::LLAISYS_CPU_NS {

inline int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }
constexpr int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }

// Calls f(i, n) for whole vectors (n = kLanes) and once for the remainder (n < kLanes).
template <typename F> inline void for_vectors(int64_t n, const F &f) {
    int64_t i = 0;
    for (; i + kLanes <= n; i += kLanes) {
        f(i, int64_t(kLanes));
    }
    if (i < n) {
        f(i, n - i);
    }
}
template <typename T> inline vf load_up_to(const T *p, int64_t n) {
    return n == kLanes ? load(p) : load_some(p, n);
}
template <typename T> inline void store_up_to(T *p, vf value, int64_t n) {
    n == kLanes ? store(p, value) : store_some(p, value, n);
}

template <typename To, typename From> void convert_row(To *out, const From *in, int64_t n) {
    for_vectors(n, [=](int64_t i, int64_t k) { store_up_to(out + i, load_up_to(in + i, k), k); });
}

// Scale of a row as bytes, NaN if a value is NaN or infinite, and its inverse, 0 if there is none.
struct ByteScale {
    float scale, factor;
    bool is_finite() const { return scale == scale; }
};
inline ByteScale byte_scale(const float *in, int64_t n) {
    constexpr int kChains = 4; // hide latency
    vf largest[kChains] = {zero(), zero(), zero(), zero()};
    vf nothing[kChains] = {zero(), zero(), zero(), zero()}; // NaN if any value is NaN or infinite
    const auto add_to = [&](int c, vf x) {
        largest[c] = max_num(max_num(x, sub(zero(), x)), largest[c]);
        nothing[c] = fma(x, zero(), nothing[c]);
    };
    int64_t i = 0;
    for (; i + kChains * kLanes <= n; i += kChains * kLanes) {
#pragma GCC unroll 4
        for (int c = 0; c < kChains; ++c) {
            add_to(c, load(in + i + c * kLanes));
        }
    }
    for_vectors(n - i, [&](int64_t j, int64_t k) { add_to(0, load_up_to(in + i + j, k)); });
    for (int c = 1; c < kChains; ++c) {
        largest[0] = max_num(largest[0], largest[c]);
        nothing[0] = add(nothing[0], nothing[c]);
    }
    const float most = reduce_max(largest[0]);
    if (reduce_add(nothing[0]) != 0.0f) {
        return {__builtin_nanf(""), 0.0f};
    }
    const bool is_small = most < 0x1p-100f;
    return {is_small ? 0.0f : most / 127.0f, is_small ? 0.0f : 127.0f / most};
}

inline float quantise_row(int8_t *out, const float *in, int64_t n) {
    const ByteScale scale = byte_scale(in, n);
    for_vectors(n, [=](int64_t i, int64_t k) {
        const vf x = scale.is_finite() ? load_up_to(in + i, k) : zero();
        store_up_to(out + i, mul(x, set1(scale.factor)), k);
    });
    return scale.scale;
}

inline void dequantise_row(float *out, const int8_t *in, float scale, int64_t n) {
    for_vectors(n, [=](int64_t i, int64_t k) {
        store_up_to(out + i, mul(load_up_to(in + i, k), set1(scale)), k);
    });
}

inline void add_rows(float *out, const float *a, const float *b, int64_t n) {
    for_vectors(n, [=](int64_t i, int64_t k) {
        store_up_to(out + i, add(load_up_to(a + i, k), load_up_to(b + i, k)), k);
    });
}

inline void swiglu_row(float *out, const float *gate, const float *up, int64_t n) {
    for_vectors(n, [=](int64_t i, int64_t k) {
        const vf g = load_up_to(gate + i, k);
        const vf silu = div(g, add(set1(1.0f), exp(sub(zero(), g))));
        store_up_to(out + i, mul(silu, load_up_to(up + i, k)), k);
    });
}

// gelu(g) = g / (1 + exp(-2 u)) with the u of the tanh approximation: 1 + tanh(u) = 2 / (1 + exp(-2
// u)).
inline void geglu_row(float *out, const float *gate, const float *up, int64_t n) {
    for_vectors(n, [=](int64_t i, int64_t k) {
        const vf g = load_up_to(gate + i, k);
        const vf cube = mul(mul(g, g), mul(g, set1(0.044715f)));
        const vf u2 = mul(add(g, cube), set1(-1.5957691216057308f)); // -2 sqrt(2 / pi) (g + ...)
        const vf gelu = div(g, add(set1(1.0f), exp(u2)));
        store_up_to(out + i, up == nullptr ? gelu : mul(gelu, load_up_to(up + i, k)), k);
    });
}

// gelu(g) = max(g, 0) - |g| q(|g|) with q(x) = erfc(x / sqrt(2)) / 2 = t exp(-x^2 / 2 + p(t)) / 2, t
// = 1 / (1 + x / sqrt(8)), and the polynomial p of Numerical Recipes (erfcc), whose relative error is
// below 1.2e-7.
inline void geglu_erf_row(float *out, const float *gate, const float *up, int64_t n) {
    constexpr float kFactors[] = {-0.82215223f, 1.48851587f,  -1.13520398f,
                                  0.27886807f,  -0.18628806f, 0.09678418f,
                                  0.37409196f,  1.00002368f,  -1.26551223f};
    for_vectors(n, [=](int64_t i, int64_t k) {
        const vf g = load_up_to(gate + i, k);
        // q is 0 for values beyond 30; the limit avoids infinity times 0.
        const vf x = sub(zero(), max_num(sub(zero(), max_num(g, sub(zero(), g))), set1(-30.0f)));
        const vf t = div(set1(1.0f), fma(x, set1(0.35355339f), set1(1.0f)));
        vf sum = set1(0.17087277f);
        for (const float factor : kFactors) {
            sum = fma(sum, t, set1(factor));
        }
        const vf q = mul(mul(t, set1(0.5f)), exp(fma(mul(x, set1(-0.5f)), x, sum)));
        const vf gelu = sub(max_num(g, zero()), mul(x, q));
        store_up_to(out + i, up == nullptr ? gelu : mul(gelu, load_up_to(up + i, k)), k);
    });
}

// cap * tanh(x / cap), tanh(u) = 1 - 2 / (exp(2 u) + 1).
inline vf soft_capped(vf x, float cap) {
    const vf e = exp(mul(x, set1(2.0f / cap)));
    const vf tanh = sub(set1(1.0f), div(set1(2.0f), add(e, set1(1.0f))));
    return mul(tanh, set1(cap));
}

inline void soft_cap_row(float *x, float cap, int64_t n) {
    for_vectors(n, [=](int64_t i, int64_t k) {
        store_up_to(x + i, soft_capped(load_up_to(x + i, k), cap), k);
    });
}

inline void scale_row(float *out, const float *in, float factor, const float *weight, int64_t n) {
    for_vectors(n, [=](int64_t i, int64_t k) {
        const vf x = mul(load_up_to(in + i, k), set1(factor));
        store_up_to(out + i, mul(x, load_up_to(weight + i, k)), k);
    });
}

inline void scale_in_place(float *x, float factor, int64_t n) {
    for_vectors(n, [=](int64_t i, int64_t k) {
        store_up_to(x + i, mul(load_up_to(x + i, k), set1(factor)), k);
    });
}

inline float sum_squares(const float *x, int64_t n) {
    vf sums[4] = {zero(), zero(), zero(), zero()}; // so that additions overlap
    int64_t i = 0;
    for (; i + 4 * kLanes <= n; i += 4 * kLanes) {
        for (int v = 0; v < 4; ++v) {
            const vf value = load(x + i + v * kLanes);
            sums[v] = fma(value, value, sums[v]);
        }
    }
    for_vectors(n - i, [&](int64_t j, int64_t k) {
        const vf value = load_up_to(x + i + j, k);
        sums[0] = fma(value, value, sums[0]);
    });
    return reduce_add(add(add(sums[0], sums[1]), add(sums[2], sums[3])));
}

inline float max_of(const float *x, int64_t n) {
    const vf lowest = set1(-__builtin_inff());
    vf best[4] = {lowest, lowest, lowest, lowest};
    int64_t i = 0;
    for (; i + 4 * kLanes <= n; i += 4 * kLanes) {
        for (int v = 0; v < 4; ++v) {
            best[v] = max_num(load(x + i + v * kLanes), best[v]);
        }
    }
    for (; i + kLanes <= n; i += kLanes) {
        best[0] = max_num(load(x + i), best[0]);
    }
    float result = reduce_max(max_num(max_num(best[0], best[1]), max_num(best[2], best[3])));
    for (; i < n; ++i) {
        result = x[i] > result ? x[i] : result;
    }
    return result;
}

inline int64_t find_equal(const float *x, float value, int64_t n) {
    int64_t i = 0;
    while (i + kLanes <= n && !any_equal(load(x + i), set1(value))) {
        i += kLanes;
    }
    while (i < n && x[i] != value) {
        ++i;
    }
    return i;
}

inline int64_t find_greater(const float *x, float value, int64_t n) {
    int64_t i = 0;
    while (i + kLanes <= n && !any_greater(load(x + i), set1(value))) {
        i += kLanes;
    }
    while (i < n && !(x[i] > value)) {
        ++i;
    }
    return i;
}

// In double and without calls, so that the compiler vectorises it: the angle is exact to 2^-53
// relative, is reduced to [-pi/4, pi/4] and evaluated by two polynomials.
inline void angles(float *cos, float *sin, int64_t position, const float *inv_freq, int64_t n) {
    constexpr double two_over_pi = 0.63661977236758134308;
    constexpr double half_pi_1 = 1.57079632673412561417; // pi/2 in three parts: the first two have
    constexpr double half_pi_2 = 6.07710050630396597660e-11; // 33 bits, so n * part is exact
    constexpr double half_pi_3 = 2.02226624879595063154e-21; // for n below 2^20
    constexpr double magic = 6755399441055744.0;             // 1.5 * 2^52
    const double p = double(position);
    for (int64_t i = 0; i < n; ++i) {
        const double angle = p * double(inv_freq[i]);
        const double shifted = angle * two_over_pi + magic;
        const double turns = shifted - magic; // quarter turns, to the nearest
        const double r = ((angle - turns * half_pi_1) - turns * half_pi_2) - turns * half_pi_3;
        const double r2 = r * r;
        const double s =
            r +
            r * r2 *
                (-1.0 / 6 + r2 * (1.0 / 120 + r2 * (-1.0 / 5040 +
                                                    r2 * (1.0 / 362880 + r2 * (-1.0 / 39916800)))));
        const double c =
            1.0 + r2 * (-0.5 + r2 * (1.0 / 24 + r2 * (-1.0 / 720 +
                                                      r2 * (1.0 / 40320 + r2 * (-1.0 / 3628800)))));
        const double quarter = turns - 4.0 * ((turns * 0.25 + magic) - magic); // -2, -1, 0, 1 or 2
        const bool odd = quarter == 1.0 || quarter == -1.0;
        const double cos_sign = quarter == 1.0 || quarter == 2.0 || quarter == -2.0 ? -1.0 : 1.0;
        const double sin_sign = quarter == -1.0 || quarter == 2.0 || quarter == -2.0 ? -1.0 : 1.0;
        cos[i] = float(cos_sign * (odd ? s : c));
        sin[i] = float(sin_sign * (odd ? c : s));
    }
}

inline void rotate(float *out_low, float *out_high, const float *low, const float *high,
                   const float *cos, const float *sin, int64_t n) {
    for_vectors(n, [=](int64_t i, int64_t k) {
        const vf a = load_up_to(low + i, k);
        const vf b = load_up_to(high + i, k);
        const vf c = load_up_to(cos + i, k);
        const vf s = load_up_to(sin + i, k);
        store_up_to(out_low + i, sub(mul(a, c), mul(b, s)), k);
        store_up_to(out_high + i, add(mul(b, c), mul(a, s)), k);
    });
}

} // namespace llaisys::LLAISYS_CPU_NS
