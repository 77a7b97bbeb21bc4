#include "base/dtype.hpp"

#include <limits>

namespace llaisys {

float to_f32(f16_t value) {
    const uint32_t sign = uint32_t(value.bits & 0x8000u) << 16;
    const uint32_t exponent = (value.bits >> 10) & 0x1fu;
    const uint32_t mantissa = value.bits & 0x3ffu;
    if (exponent == 0) { // zero or subnormal: mantissa * 2^-24 is exact in f32
        const float magnitude = float(mantissa) * 0x1p-24f;
        return float_of(sign | bits_of(magnitude));
    }
    if (exponent == 31) {
        return float_of(sign | 0x7f800000u | (mantissa << 13));
    }
    return float_of(sign | ((exponent + 112) << 23) | (mantissa << 13));
}

template <> bf16_t from_f32<bf16_t>(float value) {
    const uint32_t bits = bits_of(value);
    if ((bits & 0x7fffffffu) > 0x7f800000u) {
        return {uint16_t((bits >> 16) | 0x40u)};
    }
    return {uint16_t((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16)};
}

template <> f16_t from_f32<f16_t>(float value) {
    const uint32_t bits = bits_of(value);
    const uint16_t sign = uint16_t((bits >> 16) & 0x8000u);
    const uint32_t magnitude = bits & 0x7fffffffu;
    if (magnitude > 0x7f800000u) {
        return {uint16_t(sign | 0x7e00u | ((magnitude >> 13) & 0x3ffu))};
    }
    if (magnitude >= 0x477ff000u) { // rounds to 65536 or more
        return {uint16_t(sign | 0x7c00u)};
    }
    if (magnitude < 0x38800000u) { // below the smallest normal f16: round at 2^-24 by adding 0.5
        const float rounded = float_of(magnitude) + 0.5f; // ulp of [0.5, 1) is 2^-24
        return {uint16_t(sign | (bits_of(rounded) - bits_of(0.5f)))};
    }
    const uint32_t rounded = magnitude + 0xfffu + ((magnitude >> 13) & 1u);
    return {uint16_t(sign | ((rounded - (112u << 23)) >> 13))};
}

bool is_known(DType dtype) { return dtype > LLAISYS_DTYPE_INVALID && dtype < LLAISYS_DTYPE_COUNT; }

bool is_activation(DType dtype) {
    return dtype == LLAISYS_DTYPE_F32 || dtype == LLAISYS_DTYPE_F16 || dtype == LLAISYS_DTYPE_BF16;
}

bool is_quantised(DType dtype) {
    return (dtype >= LLAISYS_DTYPE_Q8_0 && dtype <= LLAISYS_DTYPE_I8_G128) ||
           dtype == LLAISYS_DTYPE_F8_G128;
}

bool is_weight(DType dtype) { return is_activation(dtype) || is_quantised(dtype); }

LlaisysDataTypeTraits traits_of(DType dtype) {
    switch (dtype) {
    case LLAISYS_DTYPE_I64:
        return {1, 8};
    case LLAISYS_DTYPE_F32:
    case LLAISYS_DTYPE_I32:
        return {1, 4};
    case LLAISYS_DTYPE_F16:
    case LLAISYS_DTYPE_BF16:
        return {1, 2};
    case LLAISYS_DTYPE_I8:
    case LLAISYS_DTYPE_U8:
    case LLAISYS_DTYPE_F8_E4M3:
        return {1, 1};
    case LLAISYS_DTYPE_Q8_0:
        return {32, 34};
    case LLAISYS_DTYPE_Q4_0:
        return {32, 18};
    case LLAISYS_DTYPE_Q4_1:
        return {32, 20};
    case LLAISYS_DTYPE_Q5_0:
        return {32, 22};
    case LLAISYS_DTYPE_Q5_1:
        return {32, 24};
    case LLAISYS_DTYPE_Q4_K:
        return {256, 144};
    case LLAISYS_DTYPE_Q5_K:
        return {256, 176};
    case LLAISYS_DTYPE_Q6_K:
        return {256, 210};
    case LLAISYS_DTYPE_Q2_K:
        return {256, 84};
    case LLAISYS_DTYPE_Q3_K:
        return {256, 110};
    case LLAISYS_DTYPE_IQ4_NL:
        return {32, 18};
    case LLAISYS_DTYPE_I4_G32:
        return {32, 22};
    case LLAISYS_DTYPE_I4_G128:
        return {128, 70};
    case LLAISYS_DTYPE_I8_G32:
        return {32, 38};
    case LLAISYS_DTYPE_I8_G128:
        return {128, 134};
    case LLAISYS_DTYPE_F8_G128:
        return {128, 132};
    default:
        fail(LLAISYS_ERROR_INVALID, "unknown dtype ", int(dtype));
    }
}

const char *name_of(DType dtype) {
    static const char *const names[] = {
        "invalid", "f32",    "f16",     "bf16",   "i64",     "i32",     "i8",     "u8",   "q8_0",
        "q4_0",    "q4_1",   "q5_0",    "q5_1",   "q4_k",    "q5_k",    "q6_k",   "q2_k", "q3_k",
        "iq4_nl",  "i4_g32", "i4_g128", "i8_g32", "i8_g128", "f8_e4m3", "f8_g128"};
    static_assert(sizeof names / sizeof names[0] == LLAISYS_DTYPE_COUNT);
    return is_known(dtype) ? names[dtype] : names[0];
}

int64_t bytes_of(DType dtype, int64_t n) {
    const LlaisysDataTypeTraits traits = traits_of(dtype);
    require(n >= 0, "number of elements must not be negative, got ", n);
    require(n % traits.block_elements == 0, name_of(dtype), " is stored in blocks of ",
            traits.block_elements, " elements, got ", n);
    const int64_t blocks = n / traits.block_elements;
    require(blocks <= std::numeric_limits<int64_t>::max() / traits.block_bytes, "size of ", n,
            " elements of ", name_of(dtype), " overflows");
    return blocks * traits.block_bytes;
}

} // namespace llaisys
