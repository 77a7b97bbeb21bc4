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
           dtype == LLAISYS_DTYPE_F8_G128 || dtype == LLAISYS_DTYPE_I8_CHANNEL;
}

bool is_weight(DType dtype) { return is_activation(dtype) || is_quantised(dtype); }

namespace {

struct TypeInfo {
    const char *name;
    LlaisysDataTypeTraits traits;
};

// By llaisysDataType_t.
constexpr TypeInfo kTypes[] = {
    {"invalid", {}},         {"f32", {1, 4}},         {"f16", {1, 2}},         {"bf16", {1, 2}},
    {"i64", {1, 8}},         {"i32", {1, 4}},         {"i8", {1, 1}},          {"u8", {1, 1}},
    {"q8_0", {32, 34}},      {"q4_0", {32, 18}},      {"q4_1", {32, 20}},      {"q5_0", {32, 22}},
    {"q5_1", {32, 24}},      {"q4_k", {256, 144}},    {"q5_k", {256, 176}},    {"q6_k", {256, 210}},
    {"q2_k", {256, 84}},     {"q3_k", {256, 110}},    {"iq4_nl", {32, 18}},    {"i4_g32", {32, 22}},
    {"i4_g128", {128, 70}},  {"i8_g32", {32, 38}},    {"i8_g128", {128, 134}}, {"f8_e4m3", {1, 1}},
    {"f8_g128", {128, 132}}, {"i8_channel", {32, 36}}};
static_assert(sizeof kTypes / sizeof kTypes[0] == LLAISYS_DTYPE_COUNT);

} // namespace

LlaisysDataTypeTraits traits_of(DType dtype) {
    require(is_known(dtype), "unknown dtype ", int(dtype));
    return kTypes[dtype].traits;
}

const char *name_of(DType dtype) { return kTypes[is_known(dtype) ? dtype : 0].name; }

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
