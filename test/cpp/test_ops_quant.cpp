// Products with quantised weights against a naive reference, on every instruction set of this machine:
// each format, odd sizes, bit equality across row counts and threads, rows read back out of panels.
//
// The reference reads the blocks by itself, value by value, and multiplies them with activations that are
// rounded to 8 bits as the operator promises to.
#include "ops_reference.hpp"

#include "ops/linear/op.hpp"

#include <vector>

using namespace ops_test;

namespace {

constexpr DType kFormats[] = {LLAISYS_DTYPE_Q8_0,    LLAISYS_DTYPE_Q4_0,   LLAISYS_DTYPE_Q4_1,
                              LLAISYS_DTYPE_Q5_0,    LLAISYS_DTYPE_Q5_1,   LLAISYS_DTYPE_Q4_K,
                              LLAISYS_DTYPE_Q5_K,    LLAISYS_DTYPE_Q6_K,   LLAISYS_DTYPE_Q2_K,
                              LLAISYS_DTYPE_Q3_K,    LLAISYS_DTYPE_IQ4_NL, LLAISYS_DTYPE_I4_G32,
                              LLAISYS_DTYPE_I4_G128, LLAISYS_DTYPE_I8_G32, LLAISYS_DTYPE_I8_G128};

float half_at(const uint8_t *p) {
    f16_t half;
    std::memcpy(&half, p, sizeof half);
    return to_f32(half);
}

// 6-bit scale (part 0) or min (part 1) number j of a K block.
int packed_scale(const uint8_t *p, int j, int part) {
    const int low = 4 * part;
    return j < 4 ? p[j + low] & 63
                 : (part == 0 ? p[j + 4] & 15 : p[j + 4] >> 4) | (p[j - 4 + low] >> 6) << 4;
}

// Value i of the block at p.
float reference_value(DType dtype, const uint8_t *p, int i) {
    const float d = half_at(p);
    const int low = i % 32 < 16 ? p[traits_of(dtype).block_bytes - 16 + i % 16] & 15
                                : p[traits_of(dtype).block_bytes - 16 + i % 16] >> 4;
    const auto bit = [&](const uint8_t *bits) { return (bits[i / 8] >> (i % 8) & 1) << 4; };
    switch (dtype) {
    case LLAISYS_DTYPE_Q8_0:
        return d * float(int8_t(p[2 + i]));
    case LLAISYS_DTYPE_Q4_0:
        return d * float(low - 8);
    case LLAISYS_DTYPE_Q4_1:
        return d * float(low) + half_at(p + 2);
    case LLAISYS_DTYPE_Q5_0:
        return d * float((low | bit(p + 2)) - 16);
    case LLAISYS_DTYPE_Q5_1:
        return d * float(low | bit(p + 4)) + half_at(p + 2);
    case LLAISYS_DTYPE_Q4_K:
    case LLAISYS_DTYPE_Q5_K: {
        const int group = i / 32;
        const uint8_t *q = p + (dtype == LLAISYS_DTYPE_Q4_K ? 16 : 48) + group / 2 * 32;
        int value = group % 2 == 0 ? q[i % 32] & 15 : q[i % 32] >> 4;
        if (dtype == LLAISYS_DTYPE_Q5_K) {
            value |= (p[16 + i % 32] >> group & 1) << 4;
        }
        const float s = d * float(packed_scale(p + 4, group, 0));
        const float m = half_at(p + 2) * float(packed_scale(p + 4, group, 1));
        return s * float(value) - m;
    }
    case LLAISYS_DTYPE_Q2_K: {
        const int value = p[16 + i / 128 * 32 + i % 32] >> (i % 128 / 32 * 2) & 3;
        const float s = half_at(p + 80) * float(p[i / 16] & 15);
        return s * float(value) - half_at(p + 82) * float(p[i / 16] >> 4);
    }
    case LLAISYS_DTYPE_Q3_K: {
        const int value = p[32 + i / 128 * 32 + i % 32] >> (i % 128 / 32 * 2) & 3;
        const int third = p[i % 32] >> (i / 32) & 1;
        const int j = i / 16;
        const int scale = (p[96 + j % 8] >> (j / 8 * 4) & 15) | (p[104 + j % 4] >> (j / 4 * 2) & 3)
                                                                    << 4;
        return half_at(p + 108) * float(scale - 32) * float(value + 4 * third - 4);
    }
    case LLAISYS_DTYPE_IQ4_NL: {
        const int steps[] = {-127, -104, -83, -65, -49, -35, -22, -10,
                             1,    13,   25,  38,  53,  69,  89,  113};
        return d * float(steps[low]);
    }
    case LLAISYS_DTYPE_I4_G32:
    case LLAISYS_DTYPE_I4_G128:
    case LLAISYS_DTYPE_I8_G32:
    case LLAISYS_DTYPE_I8_G128: {
        float s;
        std::memcpy(&s, p, sizeof s);
        const bool is_byte = dtype == LLAISYS_DTYPE_I8_G32 || dtype == LLAISYS_DTYPE_I8_G128;
        const int q = is_byte ? int(int8_t(p[6 + i])) : p[6 + i / 2] >> (i % 2 * 4) & 15;
        return s * (float(q) - half_at(p + 4));
    }
    default: { // q6_k
        const int half = i / 128;
        const int part = i % 128 / 32;
        const uint8_t *q = p + 64 * half + (part % 2) * 32 + i % 32;
        const int high = p[128 + 32 * half + i % 32] >> (2 * part) & 3;
        const int value = (part < 2 ? *q & 15 : *q >> 4) | high << 4;
        return half_at(p + 208) * float(int8_t(p[192 + i / 16])) * float(value - 32);
    }
    }
}

// Blocks of bytes in [low, high] whose f16 scales are random, small and finite.
Tensor random_weight(DType dtype, int64_t n, int64_t k, int low = 0, int high = 255) {
    const Tensor tensor = Tensor::create({n, k}, dtype);
    auto *bytes = tensor.as<uint8_t>();
    for (int64_t i = 0; i < tensor.bytes(); ++i) {
        bytes[i] = uint8_t(random_int(low, high));
    }
    const int64_t block = traits_of(dtype).block_bytes;
    for (int64_t at = 0; at < tensor.bytes(); at += block) {
        const auto put = [&](int64_t offset, float value) {
            const f16_t half = from_f32<f16_t>(value);
            std::memcpy(bytes + at + offset, &half, sizeof half);
        };
        const auto scale = [] { return float(random_int(-1000, 1000)) * 1e-4f; };
        switch (dtype) {
        case LLAISYS_DTYPE_Q6_K:
            put(208, scale());
            break;
        case LLAISYS_DTYPE_Q3_K:
            put(108, scale());
            break;
        case LLAISYS_DTYPE_Q2_K:
            put(80, scale());
            put(82, scale());
            break;
        case LLAISYS_DTYPE_I4_G32:
        case LLAISYS_DTYPE_I4_G128:
        case LLAISYS_DTYPE_I8_G32:
        case LLAISYS_DTYPE_I8_G128: {
            const float s = scale();
            std::memcpy(bytes + at, &s, sizeof s);
            put(4, float(random_int(-128, 128)));
            break;
        }
        case LLAISYS_DTYPE_Q4_1:
        case LLAISYS_DTYPE_Q5_1:
        case LLAISYS_DTYPE_Q4_K:
        case LLAISYS_DTYPE_Q5_K:
            put(2, scale());
            [[fallthrough]];
        default:
            put(0, scale());
        }
    }
    return tensor;
}

float weight_value(const Tensor &weight, int64_t row, int64_t k) {
    const auto traits = traits_of(weight.dtype());
    const int64_t block = (row * weight.size(1) + k) / traits.block_elements;
    return reference_value(weight.dtype(), weight.as<uint8_t>() + block * traits.block_bytes,
                           int(k % traits.block_elements));
}

// What the operator makes of x [k]: 32 values share a scale.
std::vector<double> rounded(const Tensor &in, int64_t row) {
    std::vector<double> x;
    for (int64_t k = 0; k < in.size(1); ++k) {
        x.push_back(get2(in, row, k));
    }
    for (size_t first = 0; first < x.size(); first += 32) {
        float bound = 0;
        for (size_t i = first; i < first + 32; ++i) {
            bound = std::max(bound, std::abs(float(x[i])));
        }
        const float inverse = bound > 0 ? 127.0f / bound : 0.0f;
        for (size_t i = first; i < first + 32; ++i) {
            x[i] = double(bound / 127.0f) * double(std::nearbyintf(float(x[i]) * inverse));
        }
    }
    return x;
}

Tensor product(const Stream &stream, const Tensor &in, const Tensor &weight,
               const Tensor *bias = nullptr) {
    const ops::LinearWeight packed = ops::LinearWeight::pack(stream, weight);
    const Tensor out = random_strided({in.size(0), weight.size(0)}, kF32);
    const ops::LinearPart part = {&packed, bias, &out};
    ops::linear(stream, in, &part, 1);
    return out;
}

// What the zero point of value k adds: it is subtracted from the sum of a block, not from each value.
float zero_part(const Tensor &weight, int64_t row, int64_t k) {
    switch (weight.dtype()) {
    case LLAISYS_DTYPE_I4_G32:
    case LLAISYS_DTYPE_I4_G128:
    case LLAISYS_DTYPE_I8_G32:
    case LLAISYS_DTYPE_I8_G128: {
        const auto traits = traits_of(weight.dtype());
        const int64_t block = (row * weight.size(1) + k) / traits.block_elements;
        const uint8_t *p = weight.as<uint8_t>() + block * traits.block_bytes;
        float s;
        std::memcpy(&s, p, sizeof s);
        return s * half_at(p + 4);
    }
    default:
        return 0;
    }
}

void check_product(const Tensor &in, const Tensor &weight, const Tensor &bias, const Tensor &out) {
    for (int64_t i = 0; i < out.size(0); ++i) {
        const std::vector<double> x = rounded(in, i);
        for (int64_t j = 0; j < out.size(1); ++j) {
            double sum = 0;
            double size = 0;
            for (int64_t k = 0; k < in.size(1); ++k) {
                const double term = x[size_t(k)] * double(weight_value(weight, j, k));
                sum += term;
                size += std::abs(term) + std::abs(x[size_t(k)] * double(zero_part(weight, j, k)));
            }
            check_close(name_of(weight.dtype()), get2(out, i, j), sum + get(bias, j),
                        3e-6 * size + 1e-5);
        }
    }
}

} // namespace

TEST(quantised_products_match_the_reference_over_odd_sizes) {
    for_each_byte_isa([] {
        for (DType dtype : kFormats) {
            const int64_t unit = traits_of(dtype).block_elements;
            for (int64_t n : {1, 31, 33}) {
                for (int64_t blocks : {1, 3}) {
                    for (int64_t m : {1, 2, 3, 4, 5, 9}) {
                        const Tensor weight = random_weight(dtype, n, blocks * unit);
                        const Tensor in = random_strided({m, blocks * unit}, kF32);
                        const Tensor bias = random_tensor({n}, kF32);
                        const Tensor out = product(two_threads(), in, weight, &bias);
                        check_product(in, weight, bias, out);
                    }
                }
            }
        }
    });
}

TEST(sums_of_the_largest_products_do_not_overflow) {
    for_each_byte_isa([] {
        for (DType dtype : kFormats) {
            for (int byte : {0x00, 0x7f, 0x80, 0xff}) {
                const Tensor weight = random_weight(dtype, 33, 256, byte, byte);
                const Tensor in = Tensor::create({20, 256}, kF32);
                for (int64_t i = 0; i < in.elements(); ++i) {
                    set(in, i, i / 256 % 2 == 0 ? 1.0f : -1.0f);
                }
                const Tensor bias = random_tensor({33}, kF32);
                check_product(in, weight, bias, product(two_threads(), in, weight, &bias));
            }
        }
    });
}

TEST(a_row_has_the_same_bits_at_any_number_of_rows_and_threads) {
    for_each_byte_isa([] {
        for (DType dtype : kFormats) {
            const Tensor weight = random_weight(dtype, 70, 768);
            const Tensor in = random_tensor({250, 768}, kF32);
            const Tensor all = product(three_threads(), in, weight);
            for (int64_t row : {0, 1, 127, 239, 240, 249}) {
                const Tensor alone = product(one_thread(), in.slice(0, row, row + 1), weight);
                for (int64_t j = 0; j < 70; ++j) {
                    CHECK_EQ(get2(all, row, j), get2(alone, 0, j));
                }
            }
        }
    });
}

TEST(wide_rows_are_taken_in_groups_that_do_not_show) {
    for_each_byte_isa([] {
        const Tensor weight = random_weight(LLAISYS_DTYPE_Q4_0, 33, 7168);
        const Tensor in = random_tensor({50, 7168}, kF32);
        const Tensor all = product(two_threads(), in, weight);
        for (int64_t row : {0, 47, 48, 49}) {
            const Tensor alone = product(one_thread(), in.slice(0, row, row + 1), weight);
            for (int64_t j = 0; j < 33; ++j) {
                CHECK_EQ(get2(all, row, j), get2(alone, 0, j));
            }
        }
    });
}

TEST(rows_come_back_out_of_panels_exactly) {
    for_each_byte_isa([] {
        for (DType dtype : kFormats) {
            const Tensor weight = random_weight(dtype, 37, 512);
            const ops::LinearWeight packed = ops::LinearWeight::pack(two_threads(), weight);
            const Tensor index = Tensor::create({3}, kI64);
            index.as<int64_t>()[0] = 36;
            index.as<int64_t>()[1] = 0;
            index.as<int64_t>()[2] = 31;
            const Tensor out = Tensor::create({3, 512}, kF32);
            ops::linear_rows(two_threads(), out, index, packed);
            for (int64_t i = 0; i < 3; ++i) {
                for (int64_t k = 0; k < 512; ++k) {
                    CHECK_EQ(float(get2(out, i, k)),
                             weight_value(weight, index.as<int64_t>()[i], k));
                }
            }
        }
    });
}

TEST(plain_and_quantised_parts_of_one_call_are_both_computed) {
    const Tensor in = random_tensor({5, 256}, kBf16);
    const Tensor quantised = random_weight(LLAISYS_DTYPE_Q6_K, 33, 256);
    const Tensor plain = random_tensor({17, 256}, kF32);
    const ops::LinearWeight first = ops::LinearWeight::pack(two_threads(), quantised);
    const ops::LinearWeight second = ops::LinearWeight::pack(two_threads(), plain);
    const Tensor a = Tensor::create({5, 33}, kF32);
    const Tensor b = Tensor::create({5, 17}, kF32);
    const Tensor c = Tensor::create({5, 33}, kF32);
    const ops::LinearPart parts[] = {
        {&first, nullptr, &a}, {&second, nullptr, &b}, {&first, nullptr, &c}};
    ops::linear(two_threads(), in, parts, 3);
    check_product(in, quantised, Tensor::create({33}, kF32), a);
    double sum = 0;
    for (int64_t k = 0; k < 256; ++k) {
        sum += get2(in, 4, k) * get2(plain, 16, k);
    }
    check_close("plain", get2(b, 4, 16), sum, 1e-4);
    CHECK_EQ(get2(a, 3, 32), get2(c, 3, 32));
}

TEST(what_is_not_finite_stays_so) {
    for_each_byte_isa([] {
        const Tensor weight = random_weight(LLAISYS_DTYPE_Q4_0, 33, 64);
        const Tensor in = random_tensor({2, 64}, kF32);
        in.as<float>()[40] = kNan;
        in.as<float>()[64 + 3] = kInf;
        const Tensor out = product(one_thread(), in, weight);
        for (int64_t j = 0; j < 33; ++j) {
            CHECK(std::isnan(get2(out, 0, j)));
            CHECK(std::isnan(get2(out, 1, j)));
        }
    });
}

TEST(a_width_that_does_not_fill_blocks_is_refused) {
    CHECK_THROWS(Tensor::create({4, 100}, LLAISYS_DTYPE_Q8_0), "blocks of 32", "[4, 100]");
    CHECK_THROWS(Tensor::create({4, 128}, LLAISYS_DTYPE_Q4_K), "blocks of 256", "[4, 128]");
}
