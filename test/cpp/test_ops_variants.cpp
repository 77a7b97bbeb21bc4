// Operators of families other than Llama against naive references in double, on every device: layer
// norm, GELU, scaling with a soft cap. Odd sizes, strided views, mixed dtypes, in place.
#include "ops_devices.hpp"

#include "ops/elementwise/op.hpp"
#include "ops/glu/op.hpp"
#include "ops/norm/op.hpp"

using namespace ops_test;

namespace {

const Shape kShapes[] = {{1, 1}, {3, 7}, {5, 33}, {2, 513}, {33, 1031}};

// value(i, j) of every element.
template <typename Value> std::vector<double> values_of(const Shape &shape, const Value &value) {
    std::vector<double> values;
    for (int64_t i = 0; i < shape[0]; ++i) {
        for (int64_t j = 0; j < shape[1]; ++j) {
            values.push_back(value(i, j));
        }
    }
    return values;
}

// body(input dtype, output dtype, shape) for all.
template <typename Body> void for_each_case(const Body &body) {
    for (DType in_dtype : kReal) {
        for (DType out_dtype : kReal) {
            for (const Shape &shape : kShapes) {
                body(in_dtype, out_dtype, shape);
            }
        }
    }
}

std::vector<double> layer_norm(const Tensor &in, const Tensor &weight, const Tensor &bias) {
    const int64_t d = in.size(1);
    std::vector<double> mean(size_t(in.size(0))), deviation(mean.size());
    for (int64_t i = 0; i < in.size(0); ++i) {
        double sum = 0, squares = 0;
        for (int64_t j = 0; j < d; ++j) {
            sum += get2(in, i, j);
        }
        mean[size_t(i)] = sum / double(d);
        for (int64_t j = 0; j < d; ++j) {
            squares += std::pow(get2(in, i, j) - mean[size_t(i)], 2);
        }
        deviation[size_t(i)] = std::sqrt(squares / double(d) + 1e-5);
    }
    return values_of(in.shape(), [&](int64_t i, int64_t j) {
        return (get2(in, i, j) - mean[size_t(i)]) / deviation[size_t(i)] * get(weight, j) +
               (bias.defined() ? get(bias, j) : 0);
    });
}

double gelu(double x, bool is_erf) {
    constexpr double kRoot = 0.79788456080286535588; // sqrt(2 / pi)
    return 0.5 * x *
           (1 + (is_erf ? std::erf(x / std::sqrt(2.0))
                        : std::tanh(kRoot * (x + 0.044715 * x * x * x))));
}

} // namespace

TEST(layer_norm_matches_reference) {
    for_each_device([](const Stream &stream) {
        for_each_case([&](DType in_dtype, DType out_dtype, const Shape &shape) {
            for (const bool has_bias : {false, true}) {
                const Tensor in = random_strided(shape, in_dtype, 3.0f);
                for (int64_t i = 0; i < shape[0] * shape[1]; ++i) { // a mean far from 0
                    const int64_t at = i / shape[1] * in.stride(0) + i % shape[1];
                    set(in, at, float(get(in, at)) + 5);
                }
                const Tensor weight = random_tensor({shape[1]}, kF32);
                const Tensor bias = has_bias ? random_tensor({shape[1]}, kF32) : Tensor();
                const Tensor device_in = on(stream, in), device_weight = on(stream, weight);
                const Tensor device_bias = on(stream, bias);
                const Tensor *const given = has_bias ? &device_bias : nullptr;
                const Tensor out = on(stream, random_strided(shape, out_dtype));
                ops::layer_norm(stream, out, device_in, device_weight, given, 1e-5f);
                const Tensor got = to_host(stream, out);
                check_all_close("layer_norm", got, layer_norm(in, weight, bias), 8);
                if (in_dtype == out_dtype) {
                    ops::layer_norm(stream, device_in, device_in, device_weight, given, 1e-5f);
                    CHECK(same_bits(to_host(stream, device_in), got));
                }
            }
        });
    });
}

TEST(gelu_matches_reference) {
    for_each_device([](const Stream &stream) {
        for_each_case([&](DType in_dtype, DType out_dtype, const Shape &shape) {
            for (const bool is_erf : {false, true}) {
                const auto activation =
                    is_erf ? ops::Activation::gelu_erf : ops::Activation::gelu_tanh;
                const Tensor gate = random_strided(shape, in_dtype, 8.0f);
                const Tensor up = random_strided(shape, kBf16);
                const Tensor device_gate = on(stream, gate), device_up = on(stream, up);
                const Tensor out = on(stream, random_strided(shape, out_dtype));
                ops::glu(stream, out, device_gate, &device_up, activation);
                check_all_close("gelu * up", to_host(stream, out),
                                values_of(shape,
                                          [&](int64_t i, int64_t j) {
                                              return gelu(get2(gate, i, j), is_erf) *
                                                     get2(up, i, j);
                                          }),
                                8);
                ops::glu(stream, out, device_gate, nullptr, activation);
                check_all_close(
                    "gelu", to_host(stream, out),
                    values_of(shape,
                              [&](int64_t i, int64_t j) { return gelu(get2(gate, i, j), is_erf); }),
                    8);
            }
        });
    });
}

TEST(gelu_of_extreme_values) {
    for_each_device([](const Stream &stream) {
        const float values[] = {-1e4f, -90, 0, 90, 1e4f, kInf};
        const double expected[] = {0, 0, 0, 90, 1e4, kInf};
        const Tensor in = Tensor::create({1, 6}, kF32);
        std::copy_n(values, 6, in.as<float>());
        for (const auto activation : {ops::Activation::gelu_erf, ops::Activation::gelu_tanh}) {
            const Tensor out = on(stream, Tensor::create({1, 6}, kF32));
            ops::glu(stream, out, on(stream, in), nullptr, activation);
            const Tensor got = to_host(stream, out);
            for (int64_t i = 0; i < 6; ++i) {
                check_close("gelu", get(got, i), expected[i], 1e-6 * std::abs(expected[i]) + 1e-30);
            }
        }
    });
}

TEST(scale_and_soft_cap_match_reference) {
    for_each_device([](const Stream &stream) {
        for_each_case([&](DType in_dtype, DType out_dtype, const Shape &shape) {
            for (const float factor : {1.0f, 0.3f}) {
                for (const float cap : {0.0f, 2.5f}) {
                    const Tensor in = random_strided(shape, in_dtype, 8.0f);
                    const Tensor out = on(stream, random_strided(shape, out_dtype));
                    ops::scale(stream, out, on(stream, in), factor, cap);
                    check_all_close("scale", to_host(stream, out),
                                    values_of(shape,
                                              [&](int64_t i, int64_t j) {
                                                  const double x = get2(in, i, j) * double(factor);
                                                  return cap > 0 ? cap * std::tanh(x / cap) : x;
                                              }),
                                    8, std::max<double>(cap, 1e-3)); // the error is one of tanh
                }
            }
        });
    });
    const Tensor x = random_tensor({2, 3}, kF32);
    for (const float cap : {-1.0f, kNan}) {
        CHECK_THROWS(ops::scale(one_thread(), x, x, 1.0f, cap), "scale", "soft_cap", "at least 0");
    }
    const Tensor integers = Tensor::create({2, 3}, kI32);
    CHECK_THROWS(ops::scale(one_thread(), x, integers, 1.0f), "scale", "in", "i32");
    CHECK_THROWS(ops::scale(one_thread(), x, Tensor::create({2, 4}, kF32), 1.0f), "scale", "[2, 4]",
                 "[2, 3]");
}

TEST(layer_norm_and_gelu_check_their_arguments) {
    const Stream &s = one_thread();
    const Tensor x = random_tensor({2, 3}, kF32);
    const Tensor wrong = Tensor::create({4}, kF32);
    const Tensor weight = random_tensor({3}, kF32);
    CHECK_THROWS(ops::layer_norm(s, x, x, wrong, nullptr, 0.0f), "layer_norm", "weight", "[4]");
    CHECK_THROWS(ops::layer_norm(s, x, x, weight, &wrong, 0.0f), "layer_norm", "bias", "[4]");
    const Tensor up = Tensor::create({2, 4}, kF32);
    CHECK_THROWS(ops::glu(s, x, x, &up, ops::Activation::gelu_erf), "up", "[2, 4]", "[2, 3]");
}
