#include "ops/layer_norm/op.hpp"

#include "ops/cpu/rows.hpp"

#include <cmath>

namespace llaisys::ops {

namespace {

using cpu::kPiece;

struct Row {
    std::byte *data;
    DType dtype;
    std::byte *at(int64_t i) const { return cpu::at(data, dtype, i); }
};

// Sum of f(x) over a row, in double and in order.
template <typename F> double sum_of(const cpu::Kernels &kernels, Row x, int64_t d, const F &f) {
    float buffer[kPiece];
    double sum = 0;
    for (int64_t i = 0; i < d; i += kPiece) {
        const int64_t n = std::min(kPiece, d - i);
        const float *values = cpu::read(kernels, x.at(i), x.dtype, buffer, n);
        for (int64_t j = 0; j < n; ++j) {
            sum += f(double(values[j]));
        }
    }
    return sum;
}

void norm_row(const cpu::Kernels &kernels, Row out, Row in, Row weight, Row bias, int64_t d,
              float epsilon) {
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
        const float *x = cpu::read(kernels, in.at(i), in.dtype, values, n);
        const float *w = cpu::read(kernels, weight.at(i), weight.dtype, weights, n);
        const float *b =
            bias.data == nullptr ? nullptr : cpu::read(kernels, bias.at(i), bias.dtype, biases, n);
        for (int64_t j = 0; j < n; ++j) {
            values[j] = (x[j] - shift) * factor * w[j] + (b == nullptr ? 0.0f : b[j]);
        }
        cpu::finish(kernels, out.at(i), out.dtype, values, n);
    }
}

} // namespace

void layer_norm_cpu(const device::Stream &stream, const Tensor &out, const Tensor &in,
                    const Tensor &weight, const Tensor *bias, float epsilon) {
    const int64_t d = in.size(1);
    const cpu::Kernels &kernels = cpu::kernels();
    const Row shift =
        bias == nullptr ? Row{nullptr, LLAISYS_DTYPE_F32} : Row{bias->data(), bias->dtype()};
    cpu::for_rows(stream, in.size(0), 3 * d, [&](int64_t first, int64_t last) {
        for (int64_t i = first; i < last; ++i) {
            norm_row(kernels, {cpu::row_of(out, i), out.dtype()}, {cpu::row_of(in, i), in.dtype()},
                     {weight.data(), weight.dtype()}, shift, d, epsilon);
        }
    });
}

} // namespace llaisys::ops
