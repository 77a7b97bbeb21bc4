// Functions built on the vector abstraction. Included after one simd_<isa>.hpp, which opens its own
// namespace LLAISYS_CPU_NS: the linker must never pick code compiled for an instruction set for the
// rest of the library, so kernels use no inline function outside that namespace.
//
// A simd_<isa>.hpp defines:
//   kLanes, vf (f32 lanes), vi (i32 lanes)
//   set1, load / store of f32, f16, bf16, i8 (unaligned; stores round to nearest even; values stored as
//   i8 are within 127 of zero after rounding)
//   load_aside (default below): load through other execution units
//   low_halves, high_halves: the first or second of the pairs of bf16 that fill a vector
//   fma(a, b, c) = a * b + c; max_num(a, b): b where a is NaN; clamp keeps NaN
//   any_greater, any_equal; reduce_add, reduce_max: fixed order
//   select_greater(a, b, x, y): x where a > b, y elsewhere
//   keep_lanes(x, begin, end, other): lanes [begin, end) of x, the others of `other`; begin <= end,
//   which may lie outside the vector
//   reduce_max_each (default below): lane r is reduce_max of the r-th of kLanes vectors
//   store_sums (default below): reduce_add of each vector, adjacent
//   round_to_int, to_float, half_of, sub, power_of_2: for exp
//   quad, load_quad, load_single, fma_lane<i>: products with the i-th of four x
//   fma_broadcast<times, offset>(low_sum, high_sum, low, high, base, stride) (default below):
//   low_sum += low * x and high_sum += high * x, where x is the float at base + times * stride +
//   offset, in bytes; times is 0, 1 or 2. broadcasts_rows(rows): register tiles of this height use it
//   instead of quads
//   load_transposed (where keys are transposed): lane j of transposed[c] is rows.row(j)[i + c], for
//   kLanes x kLanes values; byte_of<c>: byte c of each lane's four, signed
//   kTileRows: height of a register tile for many rows; kMaxTileRows: largest height; tile_height(m)
//   (default below): height of the first of the tiles that m rows are divided into;
//   tile_vectors(rows): its width, two or a multiple of it; kDirectTiles: up to this many tiles,
//   widening 16-bit weights in registers is cheaper than storing them widened
//   kBlockK: K block of a panel, which many rows widen at once
//   kStreamBytes: prefetch distance of a weight stream; kFarStreamBytes: how much further it is
//   prefetched into L2 (0: not)
#pragma once

#include <cstring>

#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic ignored "-Wignored-attributes" // vector types as template arguments
#endif

namespace llaisys::LLAISYS_CPU_NS {

inline vf zero() { return set1(0.0f); }

inline vf add(vf a, vf b) { return a + b; }
inline vf sub(vf a, vf b) { return a - b; }
inline vf mul(vf a, vf b) { return a * b; }
inline vf div(vf a, vf b) { return a / b; }

// Defaults that an instruction set may overload.
template <typename T> inline vf load_aside(const T *p) { return load(p); }
template <int n> inline vf reduce_max_each(const vf (&a)[n]) {
    static_assert(n == kLanes);
    float largest[n];
    for (int i = 0; i < n; ++i) {
        largest[i] = reduce_max(a[i]);
    }
    return load(largest);
}
template <int n> inline void store_sums(float *p, const vf (&a)[n]) {
    for (int i = 0; i < n; ++i) {
        p[i] = reduce_add(a[i]);
    }
}
template <int times, int offset, typename V>
inline void fma_broadcast(V &low_sum, V &high_sum, V low, V high, const float *base,
                          int64_t stride) {
    const char *at = reinterpret_cast<const char *>(base) + times * stride + offset;
    const V x = set1(*reinterpret_cast<const float *>(at));
    low_sum = fma(low, x, low_sum);
    high_sum = fma(high, x, high_sum);
}
template <typename N> constexpr N tile_height(N m) { // nearly equal heights
    const N tiles = (m + kTileRows - 1) / kTileRows;
    return (m + tiles - 1) / tiles;
}

// kLanes pairs of bf16 in memory order.
inline vf load_raw_pairs(const bf16_t *p) { return load(reinterpret_cast<const float *>(p)); }

// The first n < kLanes values at any address; the other lanes are zero.
template <typename T> inline vf load_some(const T *p, int64_t n) {
    T buffer[kLanes] = {};
    for (int64_t i = 0; i < n; ++i) {
        std::memcpy(buffer + i, p + i, sizeof(T));
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

// e^(x - n ln 2), n the integer nearest to x / ln 2; within 1 ulp.
inline vf exp_of_rest(vf x, vi n) {
    const vf fn = to_float(n);
    vf r = fma(fn, set1(-0x1.62e4p-1f), x); // ln 2 in two parts: n times the first is exact
    r = fma(fn, set1(-1.42860682e-6f), r);
    vf p = set1(0x1.6a23dp-10f); // (e^r - 1 - r) / r^2 on |r| <= ln 2 / 2, own minimax fit
    p = fma(p, r, set1(0x1.123a2p-7f));
    p = fma(p, r, set1(0x1.5558f2p-5f));
    p = fma(p, r, set1(0x1.555492p-3f));
    p = fma(p, r, set1(0x1.fffffcp-2f));
    p = fma(p, r, set1(1.0f));
    return fma(p, r, set1(1.0f));
}

// e^x within 1 ulp; 0 below -104, infinity above 88.73, NaN stays NaN.
inline vf exp(vf x) {
    x = clamp(set1(-105.0f), set1(89.0f), x);
    const vi n = round_to_int(mul(x, set1(1.44269504f)));
    const vi half = half_of(n); // 2^n in two steps: n may be outside the exponents of f32
    return mul(mul(exp_of_rest(x, n), power_of_2(half)), power_of_2(sub(n, half)));
}

// The same for x <= 88, cheaper: 0 already below -87.6.
inline vf exp_below_88(vf x) {
    x = clamp(set1(-88.0f), set1(88.0f), x);
    const vi n = round_to_int(mul(x, set1(1.44269504f))); // -127 at least, where power_of_2 is 0
    return mul(exp_of_rest(x, n), power_of_2(n));
}

} // namespace llaisys::LLAISYS_CPU_NS
