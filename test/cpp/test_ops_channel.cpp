// Products with i8_channel weights: activations are rounded to 8 bits with one scale per row where the
// machine has kernels for strips, which give the same bits, and per 32 values elsewhere.
#include "ops_reference.hpp"

#include "ops/linear/op.hpp"

#include <vector>

using namespace ops_test;

namespace {

constexpr DType kChannel = LLAISYS_DTYPE_I8_CHANNEL;
constexpr int64_t kBlockBytes = 36;

float scale_of(const Tensor &weight, int64_t row) {
    float scale;
    std::memcpy(&scale, weight.data() + row * weight.size(1) / 32 * kBlockBytes, sizeof scale);
    return scale;
}
int value_of(const Tensor &weight, int64_t row, int64_t k) {
    return int8_t(weight.as<uint8_t>()[(row * weight.size(1) + k) / 32 * kBlockBytes + 4 + k % 32]);
}

Tensor random_weight(int64_t n, int64_t k) {
    const Tensor weight = Tensor::create({n, k}, kChannel);
    for (int64_t row = 0; row < n; ++row) {
        const float scale = float(random_int(1, 1000)) * 1e-4f;
        for (int64_t block = row * k / 32; block < (row + 1) * k / 32; ++block) {
            uint8_t *bytes = weight.as<uint8_t>() + block * kBlockBytes;
            std::memcpy(bytes, &scale, sizeof scale);
            for (int i = 4; i < kBlockBytes; ++i) {
                bytes[i] = uint8_t(random_int(0, 255));
            }
        }
    }
    return weight;
}

// Whether this machine, as the test has set it up, gives a row one scale.
bool has_strips() { return ops::cpu::strip_kernels(kChannel) != nullptr; }

// What the operator makes of row `row`: values that share a scale in groups.
std::vector<double> rounded(const Tensor &in, int64_t row, int64_t group) {
    std::vector<double> x;
    for (int64_t first = 0; first < in.size(1); first += group) {
        float bound = 0;
        for (int64_t k = first; k < first + group; ++k) {
            bound = std::max(bound, std::abs(float(get2(in, row, k))));
        }
        const float inverse = bound > 0 ? 127.0f / bound : 0.0f;
        for (int64_t k = first; k < first + group; ++k) {
            x.push_back(double(bound / 127.0f) *
                        std::nearbyintf(float(get2(in, row, k)) * inverse));
        }
    }
    return x;
}

void check_product(const Tensor &in, const Tensor &weight, const Tensor *bias, const Tensor &out) {
    const int64_t group = has_strips() ? in.size(1) : 32;
    for (int64_t i = 0; i < out.size(0); ++i) {
        const std::vector<double> x = rounded(in, i, group);
        for (int64_t j = 0; j < out.size(1); ++j) {
            double sum = bias != nullptr ? get(*bias, j) : 0;
            double size = std::abs(sum);
            for (int64_t k = 0; k < in.size(1); ++k) {
                const double term =
                    x[size_t(k)] * value_of(weight, j, k) * double(scale_of(weight, j));
                sum += term;
                size += std::abs(term);
            }
            check_close("i8_channel", get2(out, i, j), sum,
                        2e-6 * size + unit_of(out.dtype()) * std::abs(sum) + 1e-6);
        }
    }
}

Tensor product(const Stream &stream, const Tensor &in, const ops::LinearWeight &weight,
               const Tensor *bias = nullptr, DType dtype = kF32) {
    const Tensor out = random_strided({in.size(0), weight.out_features}, dtype);
    const ops::LinearPart part = {&weight, bias, &out};
    ops::linear(stream, in, &part, 1);
    return out;
}

} // namespace

TEST(channel_products_match_the_reference_over_odd_sizes) {
    for_each_byte_isa([] {
        for (int64_t n : {1, 17, 45, 230}) {
            for (int64_t k : {32, 96, 1504}) {
                const Tensor weight = random_weight(n, k);
                const ops::LinearWeight packed = ops::LinearWeight::pack(two_threads(), weight);
                const Tensor bias = random_tensor({n}, kF16);
                const auto many = n < 230 ? std::vector<int64_t>{1, 2, 3, 8, 9, 16, 17, 33}
                                          : std::vector<int64_t>{130};
                for (int64_t m : many) {
                    if (m == 130 && k == 1504) {
                        continue; // a slow reference
                    }
                    const DType dtype = kReal[(m + k) % 3];
                    const Tensor in = random_strided({m, k}, dtype);
                    const Tensor *added = m % 2 == 1 ? &bias : nullptr;
                    check_product(in, weight, added,
                                  product(two_threads(), in, packed, added, dtype));
                }
            }
        }
    });
}

TEST(channel_products_have_the_same_bits_in_any_batch_and_on_every_kernel_for_strips) {
    const Tensor weight = random_weight(230, 1504);
    const Tensor in = random_tensor({261, 1504}, kF32);
    const Tensor bias = random_tensor({230}, kF32);
    Tensor first;
    for_each_byte_isa([&] {
        const ops::LinearWeight packed = ops::LinearWeight::pack(two_threads(), weight);
        const Tensor all = product(three_threads(), in, packed, &bias);
        if (has_strips()) {
            CHECK(!first.defined() || same_bits(all, first));
            first = all;
        }
        for (int64_t m : {1, 2, 7, 8, 9, 16, 31, 32, 33, 130}) {
            const Tensor some =
                product(*all_streams()[m % 3], in.slice(0, 100, 100 + m), packed, &bias);
            CHECK(same_bits(some, all.slice(0, 100, 100 + m)));
        }
    });
}

TEST(groups_of_channel_weights_have_the_bits_of_single_products) {
    for_each_byte_isa([] {
        const Tensor in = random_tensor({60, 96}, kBf16);
        std::vector<ops::LinearWeight> weights;
        for (int i = 0; i < 3; ++i) {
            weights.push_back(ops::LinearWeight::pack(two_threads(), random_weight(70, 96)));
        }
        const Tensor out = random_tensor({60, 70}, kF32);
        const ops::LinearPart parts[] = {{&weights[0], nullptr, &out},
                                         {&weights[1], nullptr, &out},
                                         {&weights[2], nullptr, &out}};
        const ops::LinearGroup groups[] = {
            {0, 1, &parts[0]}, {1, 19, &parts[1]}, {20, 40, &parts[2]}};
        ops::linear_groups(three_threads(), in, nullptr, groups, 3, 1);
        for (const ops::LinearGroup &group : groups) {
            const int64_t end = group.first + group.count;
            const Tensor one =
                product(one_thread(), in.slice(0, group.first, end), *group.parts->weight);
            CHECK(same_bits(out.slice(0, group.first, end), one));
        }
    });
}

TEST(channel_rows_come_back_exactly) {
    for_each_byte_isa([] {
        const Tensor weight = random_weight(37, 96);
        const ops::LinearWeight packed = ops::LinearWeight::pack(two_threads(), weight);
        CHECK_EQ(packed.bytes.bytes() + (packed.scales.defined() ? packed.scales.bytes() : 0),
                 ops::LinearWeight::bytes_on(LLAISYS_DEVICE_CPU, kChannel, 37, 96));
        for (DType dtype : kReal) {
            const Tensor out = Tensor::create({3, 96}, dtype);
            ops::linear_rows(two_threads(), out, i64_tensor({36, 0, 16}), packed);
            const int64_t rows[] = {36, 0, 16};
            for (int64_t i = 0; i < 3; ++i) {
                for (int64_t k = 0; k < 96; ++k) {
                    const Tensor expected = Tensor::create({1}, dtype);
                    set(expected, 0,
                        scale_of(weight, rows[i]) * float(value_of(weight, rows[i], k)));
                    CHECK_EQ(get2(out, i, k), get(expected, 0));
                }
            }
        }
    });
}

TEST(channel_sums_of_the_largest_products_do_not_overflow) {
    for_each_byte_isa([] {
        const int64_t k = 131072;
        for (uint8_t byte : {uint8_t(0x80), uint8_t(0x7f)}) {
            const Tensor weight = Tensor::create({2, k}, kChannel);
            for (int64_t i = 0; i < weight.bytes(); ++i) {
                weight.as<uint8_t>()[i] = byte;
            }
            for (int64_t at = 0; at < weight.bytes(); at += kBlockBytes) {
                const float scale = 0x1p-10f;
                std::memcpy(weight.data() + at, &scale, sizeof scale);
            }
            const Tensor in = Tensor::create({2, k}, kF32);
            std::fill_n(in.as<float>(), k, 1.0f);
            std::fill_n(in.as<float>() + k, k, -1.0f);
            const Tensor out =
                product(two_threads(), in, ops::LinearWeight::pack(two_threads(), weight));
            const double sum = double(k) * 0x1p-10 * int8_t(byte);
            check_close("largest", get2(out, 0, 1), sum, 1e-5 * std::abs(sum));
            check_close("largest", get2(out, 1, 0), -sum, 1e-5 * std::abs(sum));
        }
    });
}

TEST(channel_rows_that_are_not_finite_stay_so) {
    for_each_byte_isa([] {
        const ops::LinearWeight packed =
            ops::LinearWeight::pack(one_thread(), random_weight(33, 64));
        const Tensor in = random_tensor({3, 64}, kF32);
        in.as<float>()[40] = kNan;
        in.as<float>()[64 + 3] = -kInf;
        const Tensor out = product(one_thread(), in, packed);
        for (int64_t j = 0; j < 33; ++j) {
            CHECK(std::isnan(get2(out, 0, j)) && std::isnan(get2(out, 1, j)));
            CHECK(std::isfinite(get2(out, 2, j)));
        }
    });
}

TEST(a_channel_row_with_two_scales_is_rejected) {
    for_each_byte_isa([] {
        const Tensor weight = random_weight(40, 96);
        weight.as<uint8_t>()[(33 * 3 + 2) * kBlockBytes] ^= 1;
        CHECK_THROWS(ops::LinearWeight::pack(two_threads(), weight), "i8_channel", "row 33",
                     "scales");
        if (has_strips()) {
            const Tensor wide = Tensor::create({1, 131104}, kChannel);
            CHECK_THROWS(ops::LinearWeight::pack(two_threads(), wide), "131072", "131104");
        }
    });
}
