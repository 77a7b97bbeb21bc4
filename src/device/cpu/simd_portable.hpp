// The vector abstraction in plain C++: four lanes through the compiler's vector types. See simd.hpp
// for the names. fma here is a product and a sum, rounded twice.
#pragma once

#include "base/dtype.hpp"
#include "device/cpu/isa.hpp"

#ifndef LLAISYS_CPU_NS
#define LLAISYS_CPU_NS cpu_portable
#endif

namespace llaisys::LLAISYS_CPU_NS {

constexpr device::Isa kIsa = device::Isa::portable;
constexpr int kLanes = 4;
typedef float vf __attribute__((vector_size(16)));
typedef int32_t vi __attribute__((vector_size(16)));

inline vf set1(float value) { return vf{value, value, value, value}; }

inline vf load(const float *p) {
    vf value;
    std::memcpy(&value, p, sizeof value);
    return value;
}
inline vf load(const bf16_t *p) {
    return vf{float_of(uint32_t(p[0].bits) << 16), float_of(uint32_t(p[1].bits) << 16),
              float_of(uint32_t(p[2].bits) << 16), float_of(uint32_t(p[3].bits) << 16)};
}
inline vf load(const f16_t *p) {
    return vf{to_f32(p[0]), to_f32(p[1]), to_f32(p[2]), to_f32(p[3])};
}
inline vf load(const int8_t *p) { return vf{float(p[0]), float(p[1]), float(p[2]), float(p[3])}; }

inline void store(float *p, vf value) { std::memcpy(p, &value, sizeof value); }
inline void store(bf16_t *p, vf value) {
    for (int i = 0; i < kLanes; ++i) {
        p[i] = from_f32<bf16_t>(value[i]);
    }
}
inline void store(f16_t *p, vf value) {
    for (int i = 0; i < kLanes; ++i) {
        p[i] = from_f32<f16_t>(value[i]);
    }
}

inline vf low_halves(vf pairs) { return vf(vi(pairs) << 16); }
inline vf high_halves(vf pairs) { return vf(vi(pairs) & int32_t(0xffff0000u)); }

inline vf fma(vf a, vf b, vf c) { return a * b + c; }
inline vf max_num(vf a, vf b) { return a > b ? a : b; }
inline vf clamp(vf low, vf high, vf x) {
    x = x > high ? high : x;
    return x < low ? low : x;
}
inline bool any_greater(vf a, vf b) {
    const vi mask = a > b;
    return (mask[0] | mask[1] | mask[2] | mask[3]) != 0;
}
inline bool any_equal(vf a, vf b) {
    const vi mask = a == b;
    return (mask[0] | mask[1] | mask[2] | mask[3]) != 0;
}
inline vf select_greater(vf a, vf b, vf x, vf y) { return a > b ? x : y; }
inline vf keep_lanes(vf x, int64_t begin, int64_t end, vf other) {
    for (int i = 0; i < kLanes; ++i) {
        other[i] = begin <= i && i < end ? x[i] : other[i];
    }
    return other;
}

inline float reduce_add(vf a) { return (a[0] + a[2]) + (a[1] + a[3]); }
inline float reduce_max(vf a) {
    const float x = a[0] > a[1] ? a[0] : a[1];
    const float y = a[2] > a[3] ? a[2] : a[3];
    return x > y ? x : y;
}

inline vi round_to_int(vf a) {
    const vf magic = set1(12582912.0f); // 1.5 * 2^23: the last bit of the sum is one
    return vi(a + magic) - vi(magic);
}
inline vf to_float(vi a) { return vf{float(a[0]), float(a[1]), float(a[2]), float(a[3])}; }
inline void store(int8_t *p, vf value) {
    const vi ints = round_to_int(value);
    for (int i = 0; i < kLanes; ++i) {
        p[i] = int8_t(ints[i]);
    }
}
inline vi half_of(vi a) { return a >> 1; }
inline vi sub(vi a, vi b) { return a - b; }
inline vf power_of_2(vi n) { return vf((n + 127) << 23); }

// Four values of one row of x, each multiplied with a vector of weights.
using quad = const float *;
inline quad load_quad(const float *p) { return p; }
inline quad load_single(const float *p) { return p; }
template <int lane> vf fma_lane(vf w, quad x, vf acc) { return fma(w, set1(x[lane]), acc); }
constexpr bool broadcasts_rows(int) { return false; }

constexpr int kMaxTileRows = 4;
constexpr int kTileRows = 4;
constexpr int kDirectTiles = 2;
constexpr int tile_vectors(int rows) { return rows <= 2 ? 4 : 2; }
constexpr int64_t kBlockK = 256;
constexpr int kStreamBytes = 1024;
constexpr int kFarStreamBytes = 0;

} // namespace llaisys::LLAISYS_CPU_NS
