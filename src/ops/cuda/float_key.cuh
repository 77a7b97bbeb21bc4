// Unsigned keys in the order of f32 values.
#pragma once

#include <cmath>
#include <cstdint>

namespace llaisys::ops::cuda {

// NaN is -inf, and both zeros have one key.
__device__ __forceinline__ uint32_t key_of(float x) {
    const uint32_t bits = __float_as_uint(x == x ? x + 0.0f : -INFINITY);
    return bits ^ (bits >> 31 != 0 ? 0xffffffffu : 0x80000000u);
}
__device__ __forceinline__ float value_of(uint32_t key) {
    return __uint_as_float(key ^ (key >> 31 != 0 ? 0x80000000u : 0xffffffffu));
}

} // namespace llaisys::ops::cuda
