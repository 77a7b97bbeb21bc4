// What is built on the vector abstraction. Included after one simd_<isa>.hpp, which opens its own
// namespace LLAISYS_CPU_NS: code compiled for an instruction set must never be picked by the linker
// for the rest of the library, so kernels use no inline function from outside that namespace.
//
// A simd_<isa>.hpp gives:
//   kLanes, vf (f32 lanes), vi (i32 lanes)
//   set1, load / store of f32, f16, bf16 (unaligned; stores round to nearest even), split_pairs
//   add sub mul div fma(a, b, c) = a * b + c; max_num(a, b): b where a is NaN; clamp keeps NaN
//   any_greater, any_equal; reduce_add, reduce_max: one fixed order
//   round_to_int, to_float, half_of, sub, power_of_2: for exp
//   quad, load_quad, load_single, fma_lane<i>: products with the i-th of four x
//   transpose: kLanes x kLanes in registers
//   kMaxTileRows, tile_vectors(rows), kStreamBytes: shape of the register tiles
#pragma once

#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic ignored "-Wignored-attributes" // vector types as template arguments
#endif

namespace llaisys::LLAISYS_CPU_NS {

inline vf zero() { return set1(0.0f); }

// kLanes pairs of bf16 as they lie in memory, for split_pairs.
inline vf load_raw_pairs(const bf16_t *p) { return load(reinterpret_cast<const float *>(p)); }

// The first n < kLanes values; the other lanes are zero.
template <typename T> inline vf load_some(const T *p, int64_t n) {
    T buffer[kLanes] = {};
    for (int64_t i = 0; i < n; ++i) {
        buffer[i] = p[i];
    }
    return load(buffer);
}

template <typename T> inline void store_some(T *p, vf value, int64_t n) {
    T buffer[kLanes];
    store(buffer, value);
    for (int64_t i = 0; i < n; ++i) {
        p[i] = buffer[i];
    }
}

// e^x within 2 ulp; 0 below -104, infinity above 88.73, NaN stays NaN.
inline vf exp(vf x) {
    x = clamp(set1(-105.0f), set1(89.0f), x);
    const vi n = round_to_int(mul(x, set1(1.44269504f)));
    const vf fn = to_float(n);
    vf r = fma(fn, set1(-0x1.62e4p-1f), x); // ln 2 in two parts: n times the first is exact
    r = fma(fn, set1(-1.42860682e-6f), r);
    vf p = set1(0x1.9f02bep-13f); // (e^r - 1 - r) / r^2 on |r| <= ln 2 / 2, own minimax fit
    p = fma(p, r, set1(0x1.6d946ap-10f));
    p = fma(p, r, set1(0x1.11128p-7f));
    p = fma(p, r, set1(0x1.555486p-5f));
    p = fma(p, r, set1(0x1.555554p-3f));
    p = fma(p, r, set1(0.5f));
    p = add(fma(p, mul(r, r), r), set1(1.0f));
    const vi half = half_of(n); // 2^n in two steps: n may be outside the exponents of f32
    return mul(mul(p, power_of_2(half)), power_of_2(sub(n, half)));
}

} // namespace llaisys::LLAISYS_CPU_NS
