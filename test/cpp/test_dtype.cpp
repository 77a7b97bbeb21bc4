// Conversions of 16-bit floats against a reference in double, and dtype traits.
#include "base/dtype.hpp"
#include "check.hpp"

#include <cmath>
#include <limits>
#include <random>

using namespace llaisys;

namespace {

struct Format {
    int mantissa_bits;
    int min_exponent; // of the smallest normal number, 2^min_exponent
    int max_exponent;
};
constexpr Format kF16{10, -14, 15};
constexpr Format kBf16{7, -126, 127};

// The finite value of the bits of a format.
double decode(uint32_t bits, const Format &format) {
    const int m = format.mantissa_bits;
    const uint32_t fraction = bits & ((1u << m) - 1u);
    const int exponent = int((bits & 0x7fffu) >> m);
    const double sign = (bits & 0x8000u) != 0 ? -1.0 : 1.0;
    if (exponent == 0) {
        return sign * std::ldexp(double(fraction), format.min_exponent - m);
    }
    return sign * std::ldexp(double((1u << m) + fraction), exponent - 1 + format.min_exponent - m);
}

uint32_t infinity_of(const Format &format) {
    return uint32_t(format.max_exponent - format.min_exponent + 2) << format.mantissa_bits;
}

bool is_nan(uint32_t bits, const Format &format) { return (bits & 0x7fffu) > infinity_of(format); }

// Nearest value, ties to even, of a number that is not NaN. nearbyint rounds ties to even.
uint32_t encode(double value, const Format &format) {
    const uint32_t sign = std::signbit(value) ? 0x8000u : 0u;
    const double magnitude = std::fabs(value);
    if (magnitude == 0) {
        return sign;
    }
    if (std::isinf(magnitude)) {
        return sign | infinity_of(format);
    }
    const int exponent = std::max(std::ilogb(magnitude), format.min_exponent);
    const double units = std::nearbyint(std::ldexp(magnitude, format.mantissa_bits - exponent));
    // A carry into the next exponent, or out of the subnormals, is correct.
    const double bits =
        units + double(exponent - format.min_exponent) * double(1 << format.mantissa_bits);
    return sign | uint32_t(std::min(bits, double(infinity_of(format))));
}

template <typename T> void check_one(float value, const Format &format) {
    const uint32_t got = from_f32<T>(value).bits;
    if (std::isnan(value)) {
        CHECK(is_nan(got, format));
        CHECK_EQ(got & 0x8000u, bits_of(value) >> 16 & 0x8000u);
    } else if (got != encode(double(value), format)) {
        CHECK_EQ(bits_of(value), 0u); // reports the value
        CHECK_EQ(got, encode(double(value), format));
    }
}

void check_both(uint32_t bits) {
    check_one<f16_t>(float_of(bits), kF16);
    check_one<bf16_t>(float_of(bits), kBf16);
}

template <typename T> void check_round_trip(const Format &format) {
    for (uint32_t bits = 0; bits < 65536; ++bits) {
        const float value = to_f32(T{uint16_t(bits)});
        if (is_nan(bits, format)) {
            CHECK(std::isnan(value));
            CHECK(is_nan(from_f32<T>(value).bits, format));
            continue;
        }
        if ((bits & 0x7fffu) == infinity_of(format)) {
            CHECK(std::isinf(value) && std::signbit(value) == ((bits & 0x8000u) != 0));
        } else {
            CHECK_EQ(double(value), decode(bits, format));
        }
        CHECK_EQ(from_f32<T>(value).bits, bits);
    }
}

// Every rounding boundary: each 16-bit value, the midpoint to the next, and one f32 ulp to either
// side of both.
template <typename T> void check_boundaries(const Format &format) {
    for (uint32_t bits = 0; bits < infinity_of(format); ++bits) {
        const double low = decode(bits, format);
        const double high = bits + 1 == infinity_of(format)
                                ? std::ldexp(1.0, format.max_exponent + 1)
                                : decode(bits + 1, format);
        for (const double exact : {low, (low + high) / 2}) {
            const uint32_t at = bits_of(float(exact));
            for (const uint32_t near : {at, at + 1, at == 0 ? at : at - 1}) {
                check_one<T>(float_of(near), format);
                check_one<T>(float_of(near | 0x80000000u), format);
            }
        }
    }
}

} // namespace

TEST(every_f16_value_survives_the_round_trip) { check_round_trip<f16_t>(kF16); }
TEST(every_bf16_value_survives_the_round_trip) { check_round_trip<bf16_t>(kBf16); }

TEST(f16_rounds_to_nearest_even_at_every_boundary) { check_boundaries<f16_t>(kF16); }
TEST(bf16_rounds_to_nearest_even_at_every_boundary) { check_boundaries<bf16_t>(kBf16); }

TEST(random_f32_bits_round_like_the_reference) {
    std::mt19937 random(7);
    for (int i = 0; i < 1000000; ++i) {
        check_both(uint32_t(random()));
    }
    // Most random f32 values are outside the f16 range: use exponents of f16.
    for (int i = 0; i < 1000000; ++i) {
        const uint32_t exponent = 127 - 26 + uint32_t(random()) % 44;
        check_both((uint32_t(random()) & 0x807fffffu) | exponent << 23);
    }
}

TEST(special_values_convert_exactly) {
    const float inf = std::numeric_limits<float>::infinity();
    CHECK_EQ(from_f32<f16_t>(0.0f).bits, 0x0000);
    CHECK_EQ(from_f32<f16_t>(-0.0f).bits, 0x8000);
    CHECK_EQ(from_f32<f16_t>(1.0f).bits, 0x3c00);
    CHECK_EQ(from_f32<f16_t>(-2.0f).bits, 0xc000);
    CHECK_EQ(from_f32<f16_t>(65504.0f).bits, 0x7bff);
    CHECK_EQ(from_f32<f16_t>(65519.996f).bits, 0x7bff);
    CHECK_EQ(from_f32<f16_t>(65520.0f).bits, 0x7c00); // a tie: the even one is infinity
    CHECK_EQ(from_f32<f16_t>(-1e30f).bits, 0xfc00);
    CHECK_EQ(from_f32<f16_t>(inf).bits, 0x7c00);
    CHECK_EQ(from_f32<f16_t>(-inf).bits, 0xfc00);
    CHECK_EQ(from_f32<f16_t>(0x1p-24f).bits, 0x0001);
    CHECK_EQ(from_f32<f16_t>(0x1p-25f).bits, 0x0000); // a tie: the even one is zero
    CHECK_EQ(from_f32<f16_t>(0x1.000002p-25f).bits, 0x0001);
    CHECK_EQ(from_f32<f16_t>(-0x1p-30f).bits, 0x8000);
    CHECK_EQ(from_f32<f16_t>(0x1.ffep-15f).bits, 0x0400); // rounds up to the smallest normal
    CHECK_EQ(from_f32<bf16_t>(1.0f).bits, 0x3f80);
    CHECK_EQ(from_f32<bf16_t>(std::numeric_limits<float>::max()).bits, 0x7f80);
    CHECK_EQ(from_f32<bf16_t>(-inf).bits, 0xff80);
    CHECK_EQ(from_f32<bf16_t>(float_of(1)).bits, 0x0000); // the smallest subnormal
    CHECK_EQ(from_f32<bf16_t>(float_of(0x00018000)).bits, 0x0002);
}

TEST(nan_stays_nan_even_when_its_payload_is_in_the_low_bits) {
    for (const uint32_t bits : {0x7f800001u, 0x7fc00000u, 0xff800001u, 0xffffffffu, 0x7f801fffu}) {
        check_both(bits);
    }
}

TEST(traits_and_names_cover_every_type) {
    struct Expected {
        const char *name;
        int elements;
        int bytes;
    };
    const Expected expected[] = {
        {"invalid", 0, 0},     {"f32", 1, 4},         {"f16", 1, 2},         {"bf16", 1, 2},
        {"i64", 1, 8},         {"i32", 1, 4},         {"i8", 1, 1},          {"u8", 1, 1},
        {"q8_0", 32, 34},      {"q4_0", 32, 18},      {"q4_1", 32, 20},      {"q5_0", 32, 22},
        {"q5_1", 32, 24},      {"q4_k", 256, 144},    {"q5_k", 256, 176},    {"q6_k", 256, 210},
        {"q2_k", 256, 84},     {"q3_k", 256, 110},    {"iq4_nl", 32, 18},    {"i4_g32", 32, 22},
        {"i4_g128", 128, 70},  {"i8_g32", 32, 38},    {"i8_g128", 128, 134}, {"f8_e4m3", 1, 1},
        {"f8_g128", 128, 132}, {"i8_channel", 32, 36}};
    CHECK_EQ(int(std::size(expected)), int(LLAISYS_DTYPE_COUNT));
    for (int i = 1; i < LLAISYS_DTYPE_COUNT; ++i) {
        const DType dtype = DType(i);
        CHECK(is_known(dtype));
        CHECK_EQ(is_activation(dtype), i <= 3);
        const bool is_block = (i >= 8 && i <= 22) || i == 24 || i == 25;
        CHECK_EQ(is_quantised(dtype), is_block);
        CHECK_EQ(is_weight(dtype), i <= 3 || is_block);
        CHECK_EQ(traits_of(dtype).block_elements, expected[i].elements);
        CHECK_EQ(traits_of(dtype).block_bytes, expected[i].bytes);
        CHECK_EQ(std::string(name_of(dtype)), expected[i].name);
        CHECK_EQ(bytes_of(dtype, 13 * expected[i].elements), 13 * expected[i].bytes);
        CHECK_EQ(bytes_of(dtype, 0), 0);
    }
    for (const DType unknown : {LLAISYS_DTYPE_INVALID, LLAISYS_DTYPE_COUNT}) {
        CHECK(!is_known(unknown) && !is_activation(unknown) && !is_weight(unknown));
        CHECK_EQ(std::string(name_of(unknown)), "invalid");
        CHECK_THROWS(traits_of(unknown), "unknown dtype");
        CHECK_THROWS(bytes_of(unknown, 1), "unknown dtype");
    }
}

TEST(negative_and_overflowing_sizes_are_rejected) {
    const int64_t most = std::numeric_limits<int64_t>::max();
    CHECK_THROWS(bytes_of(LLAISYS_DTYPE_F32, -1), "must not be negative", "-1");
    CHECK_THROWS(bytes_of(LLAISYS_DTYPE_F32, most / 4 + 1), "overflows", "f32");
    CHECK_EQ(bytes_of(LLAISYS_DTYPE_F32, most / 4), most / 4 * 4);
    CHECK_EQ(bytes_of(LLAISYS_DTYPE_U8, most), most);
}

TEST(visit_real_passes_the_type_and_rejects_integers) {
    const auto size_of = [](auto zero) { return int(sizeof zero); };
    CHECK_EQ(visit_real(LLAISYS_DTYPE_F32, size_of), 4);
    CHECK_EQ(visit_real(LLAISYS_DTYPE_BF16, size_of), 2);
    CHECK_EQ(visit_real(LLAISYS_DTYPE_F16, size_of), 2);
    CHECK_THROWS(visit_real(LLAISYS_DTYPE_I32, size_of), "f32, f16 or bf16", "i32");
}
