// Vectors of bytes on aarch64: four lanes of four, with the dot product instructions where the file
// is compiled for them. See bytes.hpp for the names.
#pragma once

#include "device/cpu/bytes.hpp"

#include <arm_neon.h>
#include <cstddef>

namespace llaisys::LLAISYS_CPU_NS {

typedef uint8x16_t vb;
constexpr bool kUnsignedWeights = false;
constexpr int kByteOffset = 0;

inline vb load_bytes(const std::byte *p) { return vld1q_u8(reinterpret_cast<const uint8_t *>(p)); }
inline void store_bytes(std::byte *p, vb a) { vst1q_u8(reinterpret_cast<uint8_t *>(p), a); }
inline vb low_nibbles(vb a) { return vandq_u8(a, vdupq_n_u8(15)); }
inline vb high_nibbles(vb a) { return vshrq_n_u8(a, 4); }
template <int shift, int mask> vb with_bits(vb a, vb plane) {
    if constexpr (shift > 0) {
        plane = vshlq_n_u8(plane, shift);
    } else if constexpr (shift < 0) {
        plane = vshrq_n_u8(plane, -shift);
    }
    return vbslq_u8(vdupq_n_u8(mask), plane, a);
}
template <int n> vb sub_bytes(vb a) { return vsubq_u8(a, vdupq_n_u8(n)); }

struct ByteGroup {
    int8x16_t low, high;
};
inline ByteGroup load_group(const int8_t *x) { return {vld1q_s8(x), vld1q_s8(x + 16)}; }

template <int c, bool is_signed> vi dot(vi acc, vb w, const ByteGroup &x) {
    const int8x16_t half = c < 4 ? x.low : x.high;
#if defined(__ARM_FEATURE_DOTPROD)
    return vdotq_laneq_s32(acc, vreinterpretq_s8_u8(w), half, c % 4);
#else
    const int32x4_t spread = vdupq_laneq_s32(vreinterpretq_s32_s8(half), c % 4);
    const int8x16_t quad = vreinterpretq_s8_s32(spread);
    const int8x16_t weight = vreinterpretq_s8_u8(w);
    const int16x8_t first = vmull_s8(vget_low_s8(weight), vget_low_s8(quad));
    const int16x8_t second = vmull_high_s8(weight, quad);
    return vaddq_s32(acc, vpaddq_s32(vpaddlq_s16(first), vpaddlq_s16(second)));
#endif
}

using vw = vi;

// A sum is stored as the bits of 1.5 * 2^23 + sum: converting it is a subtraction, four times as
// fast as the conversion instruction, and free where a fused multiply-add consumes it.
constexpr int32_t kSumStart = 0x4b400000;
constexpr float kSumBase = 0x1.8p23f;
inline vi start_sum(int32_t value) { return vdupq_n_s32(kSumStart + value); }
inline vf sum_of(vi sum) { return vsubq_f32(float_of_bits(sum), vdupq_n_f32(kSumBase)); }
inline vi broadcast_int(const int32_t *p) { return vld1q_dup_s32(p); }
template <int n> vi start_sum_less(vi total) {
    return vmlsq_s32(vdupq_n_s32(kSumStart), total, vdupq_n_s32(n));
}
inline void hold(vi &a) { asm volatile("" : "+w"(a)); }

// Likewise: four bytes as the low bits of 2^23 + value; signed bytes are offset by 128 first. 16 bytes
// can be read at p, which is one instruction; four would be three.
inline vf float_bytes(uint8x16_t bytes, float less) {
    const uint8x16x2_t table = {bytes, vdupq_n_u8(0x4b)}; // of 0x4b000000, the bits of 2^23
    const uint8x16_t places = {0, 255, 255, 16, 1, 255, 255, 16, 2, 255, 255, 16, 3, 255, 255, 16};
    return vsubq_f32(vreinterpretq_f32_u8(vqtbl2q_u8(table, places)), vdupq_n_f32(less));
}
inline vf load_u8(const std::byte *p) { return float_bytes(load_bytes(p), 0x1p23f); }
inline vf load_i8(const std::byte *p) {
    return float_bytes(veorq_u8(load_bytes(p), vdupq_n_u8(128)), 0x1p23f + 128.0f);
}
inline int32_t sum_of_16(const int8_t *p) { return vaddlvq_s8(vld1q_s8(p)); }

constexpr bool kRowsFirst = false;
constexpr int kQuantRows = 4;
constexpr int64_t kPackedRows = kQuantRows;
constexpr int64_t quant_height(int64_t m) { return m < 4 ? (m < 2 ? 1 : 2) : 4; }
constexpr int quant_vectors(int rows, bool is_split) {
    return (rows == 1 ? 8 : rows == 2 ? 4 : 2) / (is_split ? 2 : 1);
}

} // namespace llaisys::LLAISYS_CPU_NS
