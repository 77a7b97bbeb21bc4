// Data types: traits, 16-bit floats and their conversion to and from f32.
#pragma once

#include "base/check.hpp"
#include "llaisys/types.h"

#include <cstdint>
#include <cstring>

namespace llaisys {

using DType = llaisysDataType_t;
using DeviceType = llaisysDeviceType_t;

// Storage-only 16-bit floats; arithmetic is done in f32.
struct bf16_t {
    uint16_t bits;
};
struct f16_t {
    uint16_t bits;
};

inline uint32_t bits_of(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    return bits;
}

inline float float_of(uint32_t bits) {
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}

inline float to_f32(float value) { return value; }
inline float to_f32(bf16_t value) { return float_of(uint32_t(value.bits) << 16); }
float to_f32(f16_t value);

// Round to nearest, ties to even; NaN stays NaN, overflow becomes infinity.
template <typename T> T from_f32(float value);
template <> inline float from_f32<float>(float value) { return value; }
template <> bf16_t from_f32<bf16_t>(float value);
template <> f16_t from_f32<f16_t>(float value);

bool is_known(DType dtype);
bool is_activation(DType dtype); // f32, f16 or bf16
bool is_quantised(DType dtype);  // weights in blocks: q8_0 to i8_g128, f8_g128, i8_channel
bool is_weight(DType dtype);     // activation or quantised dtypes

LlaisysDataTypeTraits traits_of(DType dtype); // throws for an unknown type
const char *name_of(DType dtype);             // "invalid" for an unknown type

// Bytes of n contiguous elements; n must fill whole blocks. Throws on overflow.
int64_t bytes_of(DType dtype, int64_t n);

template <typename T> struct dtype_of;
template <> struct dtype_of<float> {
    static constexpr DType value = LLAISYS_DTYPE_F32;
};
template <> struct dtype_of<f16_t> {
    static constexpr DType value = LLAISYS_DTYPE_F16;
};
template <> struct dtype_of<bf16_t> {
    static constexpr DType value = LLAISYS_DTYPE_BF16;
};

// Calls f(T{}) with T = the C++ type of a real dtype; throws for any other dtype.
template <typename F> decltype(auto) visit_real(DType dtype, F &&f) {
    switch (dtype) {
    case LLAISYS_DTYPE_F32:
        return f(float{});
    case LLAISYS_DTYPE_F16:
        return f(f16_t{});
    case LLAISYS_DTYPE_BF16:
        return f(bf16_t{});
    default:
        fail(LLAISYS_ERROR_INVALID, "dtype must be f32, f16 or bf16, got ", name_of(dtype));
    }
}

} // namespace llaisys
