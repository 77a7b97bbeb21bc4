// The vector abstraction on aarch64 NEON (armv8-a baseline): four lanes. See simd.hpp for names.
#pragma once

#include "base/dtype.hpp"
#include "device/cpu/isa.hpp"

#include <arm_neon.h>

#ifndef LLAISYS_CPU_NS
#define LLAISYS_CPU_NS cpu_neon
#endif

namespace llaisys::LLAISYS_CPU_NS {

constexpr device::Isa kIsa = device::Isa::neon;
constexpr int kLanes = 4;
typedef float32x4_t vf;
typedef int32x4_t vi;

inline vf set1(float value) { return vdupq_n_f32(value); }

inline vf load(const float *p) { return vld1q_f32(p); }
inline vf load(const bf16_t *p) {
    return vreinterpretq_f32_u32(vshll_n_u16(vld1_u16(reinterpret_cast<const uint16_t *>(p)), 16));
}
inline vf load(const f16_t *p) {
    return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(reinterpret_cast<const uint16_t *>(p))));
}
inline vf load(const int8_t *p) {
    uint32_t bits;
    __builtin_memcpy(&bits, p, sizeof bits);
    const int16x8_t words = vmovl_s8(vreinterpret_s8_u32(vdup_n_u32(bits)));
    return vcvtq_f32_s32(vmovl_s16(vget_low_s16(words)));
}

// Load f16 by integer arithmetic: only one of a core's two pipes converts, and not every cycle.
inline vf load_aside(const f16_t *p) {
    const int32x4_t bits = vshll_n_s16(vld1_s16(reinterpret_cast<const int16_t *>(p)), 13);
    const uint32x4_t small = vandq_u32(vreinterpretq_u32_s32(bits), vdupq_n_u32(0x8fffffffu));
    const vf value = vmulq_f32(vreinterpretq_f32_u32(small), vdupq_n_f32(0x1p112f));
    const uint32x4_t is_special = vcageq_f32(value, vdupq_n_f32(65536.0f)); // infinity and NaN
    const uint32x4_t exponent = vandq_u32(is_special, vdupq_n_u32(0x7f800000u));
    return vreinterpretq_f32_u32(vorrq_u32(vreinterpretq_u32_f32(value), exponent));
}

inline void store(float *p, vf value) { vst1q_f32(p, value); }
inline void store(bf16_t *p, vf value) {
    const uint32x4_t bits = vreinterpretq_u32_f32(value);
    const uint32x4_t odd = vandq_u32(vshrq_n_u32(bits, 16), vdupq_n_u32(1));
    const uint32x4_t near = vaddq_u32(vaddq_u32(bits, vdupq_n_u32(0x7fff)), odd);
    const uint32x4_t quiet = vorrq_u32(bits, vdupq_n_u32(0x400000));
    const uint32x4_t result = vbslq_u32(vceqq_f32(value, value), near, quiet);
    vst1_u16(reinterpret_cast<uint16_t *>(p), vshrn_n_u32(result, 16));
}
inline void store(f16_t *p, vf value) {
    vst1_u16(reinterpret_cast<uint16_t *>(p), vreinterpret_u16_f16(vcvt_f16_f32(value)));
}
inline void store(int8_t *p, vf value) {
    const int16x4_t words = vmovn_s32(vcvtnq_s32_f32(value));
    const int8x8_t bytes = vmovn_s16(vcombine_s16(words, words));
    const uint32_t bits = vget_lane_u32(vreinterpret_u32_s8(bytes), 0);
    __builtin_memcpy(p, &bits, sizeof bits);
}

inline vf low_halves(vf pairs) {
    return vreinterpretq_f32_u32(vshlq_n_u32(vreinterpretq_u32_f32(pairs), 16));
}
inline vf high_halves(vf pairs) {
    return vreinterpretq_f32_u32(vandq_u32(vreinterpretq_u32_f32(pairs), vdupq_n_u32(0xffff0000u)));
}

inline vf fma(vf a, vf b, vf c) { return vfmaq_f32(c, a, b); }
inline vf max_num(vf a, vf b) { return vbslq_f32(vcgtq_f32(a, b), a, b); }
inline vf clamp(vf low, vf high, vf x) { return vmaxq_f32(low, vminq_f32(high, x)); }
inline bool any_greater(vf a, vf b) { return vmaxvq_u32(vcgtq_f32(a, b)) != 0; }
inline bool any_equal(vf a, vf b) { return vmaxvq_u32(vceqq_f32(a, b)) != 0; }
inline vf select_greater(vf a, vf b, vf x, vf y) { return vbslq_f32(vcgtq_f32(a, b), x, y); }
inline vf keep_lanes(vf x, int64_t begin, int64_t end, vf other) {
    const int32_t indices[kLanes] = {0, 1, 2, 3};
    const int32x4_t lanes = vld1q_s32(indices);
    const uint32x4_t kept = vandq_u32(vcgeq_s32(lanes, vdupq_n_s32(int32_t(begin))),
                                      vcltq_s32(lanes, vdupq_n_s32(int32_t(end))));
    return vbslq_f32(kept, x, other);
}

inline float reduce_add(vf a) { return vaddvq_f32(a); }
inline float reduce_max(vf a) { return vmaxvq_f32(a); }
inline void store_sums(float *p, const vf (&a)[2]) {
    const vf halves = vpaddq_f32(a[0], a[1]);
    vst1_f32(p, vget_low_f32(vpaddq_f32(halves, halves)));
}
inline void store_sums(float *p, const vf (&a)[4]) {
    store(p, vpaddq_f32(vpaddq_f32(a[0], a[1]), vpaddq_f32(a[2], a[3])));
}

inline vi round_to_int(vf a) { return vcvtnq_s32_f32(a); }
inline vf to_float(vi a) { return vcvtq_f32_s32(a); }
inline vi half_of(vi a) { return vshrq_n_s32(a, 1); }
inline vi sub(vi a, vi b) { return vsubq_s32(a, b); }
inline vf power_of_2(vi n) {
    return vreinterpretq_f32_s32(vshlq_n_s32(vaddq_s32(n, vdupq_n_s32(127)), 23));
}

using quad = float32x4_t;
inline quad load_quad(const float *p) { return vld1q_f32(p); }
inline quad load_single(const float *p) { return vld1q_dup_f32(p); }
template <int lane> vf fma_lane(vf w, quad x, vf acc) { return vfmaq_laneq_f32(acc, w, x, lane); }
constexpr bool broadcasts_rows(int) { return false; }

constexpr int kMaxTileRows = 8;
constexpr int kTileRows = 8;
constexpr int kDirectTiles = 1;
constexpr int tile_vectors(int rows) { return rows <= 2 ? 8 : rows <= 5 ? 4 : 2; }
constexpr int64_t kBlockK = 256;
constexpr int kStreamBytes = 2048;
constexpr int kFarStreamBytes = 0;

} // namespace llaisys::LLAISYS_CPU_NS
