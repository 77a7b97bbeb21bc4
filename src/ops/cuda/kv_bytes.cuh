// 8-bit keys and values with a scale per token and head (layout and rounding: ops/kv_layer.hpp).
//
// Kernels are templates of a format, E4m3 or Int8, or select it at run time where they are
// memory-bound. Both formats are exact in f16.
#pragma once

#include "ops/cuda/common.cuh"
#include "ops/kv_layer.hpp"

#include <cuda_fp8.h>

namespace llaisys::ops::cuda {

struct E4m3 {
    static constexpr float kLargest = 448.0f;
    // Values of the bytes 0, 1 and 2, 3 of x.
    static __device__ __forceinline__ void to_f16(uint32_t x, uint32_t *low, uint32_t *high) {
        *low = pair(uint16_t(x));
        *high = pair(uint16_t(x >> 16));
    }
    // Values of the bytes 0, 2 and 1, 3 of x: two columns of a transposed matrix.
    static __device__ __forceinline__ void columns_to_f16(uint32_t x, uint32_t *first,
                                                          uint32_t *second) {
        to_f16(__byte_perm(x, 0, 0x3120), first, second);
    }
    static __device__ __forceinline__ uint8_t from_float(float x) {
        return __nv_cvt_float_to_fp8(x, __NV_SATFINITE, __NV_E4M3);
    }
    static __device__ __forceinline__ float to_float(uint8_t x) {
        const __half_raw half = __nv_cvt_fp8_to_halfraw(x, __NV_E4M3);
        return __half2float(__half(half));
    }

private:
    static __device__ __forceinline__ uint32_t pair(uint16_t x) {
        const __half2_raw both = __nv_cvt_fp8x2_to_halfraw2(x, __NV_E4M3);
        return uint32_t(both.x) | uint32_t(both.y) << 16;
    }
};

struct Int8 {
    static constexpr float kLargest = 127.0f;
    static __device__ __forceinline__ void to_f16(uint32_t x, uint32_t *low, uint32_t *high) {
        widen(x ^ kSigns, 0x4140, 0x4342, low, high);
    }
    static __device__ __forceinline__ void columns_to_f16(uint32_t x, uint32_t *first,
                                                          uint32_t *second) {
        widen(x ^ kSigns, 0x4240, 0x4341, first, second);
    }
    static __device__ __forceinline__ uint8_t from_float(float x) {
        return uint8_t(int8_t(__float2int_rn(x)));
    }
    static __device__ __forceinline__ float to_float(uint8_t x) { return float(int8_t(x)); }

private:
    static constexpr uint32_t kSigns = 0x80808080u;
    // A byte u (the value + 128) below exponent bits 0x64 is the f16 1024 + u.
    static __device__ __forceinline__ void widen(uint32_t u, uint32_t first, uint32_t second,
                                                 uint32_t *low, uint32_t *high) {
        *low = subtract(__byte_perm(u, 0x64646464u, first));
        *high = subtract(__byte_perm(u, 0x64646464u, second));
    }
    static __device__ __forceinline__ uint32_t subtract(uint32_t x) {
        const __half2 offset = __half2half2(__ushort_as_half(0x6480)); // 1024 + 128
        const __half2 value = __hsub2(*reinterpret_cast<const __half2 *>(&x), offset);
        return *reinterpret_cast<const uint32_t *>(&value);
    }
};

// Bits of the magnitude of x; as integers they order finite values < infinity < NaN.
__device__ __forceinline__ uint32_t magnitude_bits(float x) {
    return __float_as_uint(x) & 0x7fffffffu;
}

// Scale of a row and the factor of its values, from the largest magnitude_bits().
struct RowScale {
    float scale, factor;
};
template <typename Format> __device__ __forceinline__ RowScale row_scale(uint32_t largest_bits) {
    const float largest = __uint_as_float(largest_bits);
    if (largest_bits >= 0x7f800000u) {
        return {__uint_as_float(0x7fc00000u), 0.0f};
    }
    if (largest < 0x1p-100f) {
        return {0.0f, 0.0f};
    }
    return {largest / Format::kLargest, Format::kLargest / largest};
}
// factor 0 gives byte 0, also for NaN and infinity.
template <typename Format> __device__ __forceinline__ uint8_t quantise(float x, float factor) {
    return factor == 0.0f ? uint8_t(0) : Format::from_float(x * factor);
}

// One cache, or rows in the layout of a cache.
struct KvBytes {
    uint8_t *values; // [n_slots, n_heads, d]
    uint8_t *scales; // f32 [n_heads, n_slots]; aligned to 4 bytes if n_slots * n_heads * d is
    int64_t n_slots, n_heads, d;
    bool is_e4m3;

    __device__ __forceinline__ int64_t row_at(int64_t slot, int64_t head) const {
        return (slot * n_heads + head) * d;
    }
    __device__ __forceinline__ uint8_t *scale_at(int64_t slot, int64_t head) const {
        return scales + (head * n_slots + slot) * int64_t(sizeof(float));
    }
    __device__ __forceinline__ float scale(int64_t slot, int64_t head) const {
        const uint8_t *at = scale_at(slot, head);
        return __uint_as_float(uint32_t(at[0]) | uint32_t(at[1]) << 8 | uint32_t(at[2]) << 16 |
                               uint32_t(at[3]) << 24);
    }
    __device__ __forceinline__ void set_scale(int64_t slot, int64_t head, float scale) const {
        uint8_t *at = scale_at(slot, head);
        const uint32_t bits = __float_as_uint(scale);
        at[0] = uint8_t(bits);
        at[1] = uint8_t(bits >> 8);
        at[2] = uint8_t(bits >> 16);
        at[3] = uint8_t(bits >> 24);
    }
    // Without the scale.
    __device__ __forceinline__ float value(int64_t i) const {
        return is_e4m3 ? E4m3::to_float(values[i]) : Int8::to_float(values[i]);
    }
    const float *aligned_scales() const { return reinterpret_cast<const float *>(scales); }
};

// cache: [n_slots, n_heads, d + 4].
inline KvBytes kv_bytes(const Tensor &cache) {
    const int64_t d = cache.size(2) - kKvScaleBytes;
    auto *values = reinterpret_cast<uint8_t *>(cache.data());
    return {values, values + cache.size(0) * cache.size(1) * d, cache.size(0), cache.size(1),
            d,      cache.dtype() == LLAISYS_DTYPE_F8_E4M3};
}

// Two caches of one format and equal heads.
struct KvByteRows {
    KvBytes to, from;
};

// Copies slot `from` to slot `to`; called by all threads of a block.
__device__ __forceinline__ void copy_slot(const KvByteRows &rows, int64_t to, int64_t from) {
    const int64_t n = rows.to.n_heads * rows.to.d;
    for (int64_t c = threadIdx.x; c < n; c += blockDim.x) {
        rows.to.values[to * n + c] = rows.from.values[from * n + c];
    }
    for (int64_t head = threadIdx.x; head < rows.to.n_heads; head += blockDim.x) {
        rows.to.set_scale(to, head, rows.from.scale(from, head));
    }
}

} // namespace llaisys::ops::cuda
