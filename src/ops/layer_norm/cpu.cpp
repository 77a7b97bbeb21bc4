#include "ops/layer_norm/op.hpp"

#include "ops/cpu/rows.hpp"

#include <cmath>

namespace llaisys::ops {

namespace {

using cpu::kPiece;
using cpu::Values;

// Sum of f(x) over a row, in double and in order.
template <typename F> double sum_of(const cpu::Kernels &kernels, Values x, int64_t d, const F &f) {
    float buffer[kPiece];
    double sum = 0;
    for (int64_t i = 0; i < d; i += kPiece) {
        const int64_t n = std::min(kPiece, d - i);
        const float *values = cpu::read(kernels, x.from(i), buffer, n);
        for (int64_t j = 0; j < n; ++j) {
            sum += f(double(values[j]));
        }
    }
    return sum;
}

// bias.data null: none.
void norm_row(const cpu::Kernels &kernels, Values out, Values in, Values weight, Values bias,
              int64_t d, float epsilon) {
    const double mean = sum_of(kernels, in, d, [](double x) { return x; }) / double(d);
    const double variance =
        sum_of(kernels, in, d, [=](double x) { return (x - mean) * (x - mean); }) / double(d);
    const float shift = float(mean);
    const float factor = float(1.0 / std::sqrt(variance + double(epsilon)));
    float values[kPiece];
    float weights[kPiece];
    float biases[kPiece];
    for (int64_t i = 0; i < d; i += kPiece) {
        const int64_t n = std::min(kPiece, d - i);
        const float *x = cpu::read(kernels, in.from(i), values, n);
        const float *w = cpu::read(kernels, weight.from(i), weights, n);
        const float *b =
            bias.data == nullptr ? nullptr : cpu::read(kernels, bias.from(i), biases, n);
        for (int64_t j = 0; j < n; ++j) {
            values[j] = (x[j] - shift) * factor * w[j] + (b == nullptr ? 0.0f : b[j]);
        }
        cpu::finish(kernels, out.from(i), values, n);
    }
}

} // namespace

void layer_norm_cpu(const device::Stream &stream, const Tensor &out, const Tensor &in,
                    const Tensor &weight, const Tensor *bias, float epsilon) {
    const int64_t d = in.size(1);
    const cpu::Kernels &kernels = cpu::kernels();
    const Values shift = bias == nullptr ? cpu::values_of(nullptr) : cpu::values_of(*bias);
    cpu::for_rows(stream, in.size(0), 3 * d, [&](int64_t first, int64_t last) {
        for (int64_t i = first; i < last; ++i) {
            norm_row(kernels, cpu::row_of(out, i), cpu::row_of(in, i), cpu::values_of(weight),
                     shift, d, epsilon);
        }
    });
}

} // namespace llaisys::ops
