#include "ops/norm/op.hpp"

#include "ops/cpu/rows.hpp"

#include <cmath>

namespace llaisys::ops {

namespace {

using cpu::kPiece;
using cpu::Values;

float sum_squares(const cpu::Kernels &kernels, Values x, int64_t d) {
    float buffer[kPiece];
    float sum = 0.0f;
    for (int64_t i = 0; i < d; i += kPiece) {
        const int64_t n = std::min(kPiece, d - i);
        sum += kernels.sum_squares(cpu::read(kernels, x.from(i), buffer, n), n);
    }
    return sum;
}

void norm_row(const cpu::Kernels &kernels, Values out, Values in, Values weight, int64_t d,
              float epsilon) {
    float buffers[2][kPiece];
    const float mean = sum_squares(kernels, in, d) / float(d);
    const float factor = 1.0f / std::sqrt(mean + epsilon);
    for (int64_t i = 0; i < d; i += kPiece) {
        const int64_t n = std::min(kPiece, d - i);
        float *to = cpu::target(out.from(i), buffers[0]);
        kernels.scale(to, cpu::read(kernels, in.from(i), buffers[0], n), factor,
                      cpu::read(kernels, weight.from(i), buffers[1], n), n);
        cpu::finish(kernels, out.from(i), to, n);
    }
}

void add_row(const cpu::Kernels &kernels, Values residual, Values in, int64_t d) {
    float buffers[2][kPiece];
    for (int64_t i = 0; i < d; i += kPiece) {
        const int64_t n = std::min(kPiece, d - i);
        float *to = cpu::target(residual.from(i), buffers[0]);
        kernels.add(to, cpu::read(kernels, residual.from(i), buffers[0], n),
                    cpu::read(kernels, in.from(i), buffers[1], n), n);
        cpu::finish(kernels, residual.from(i), to, n);
    }
}

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
void layer_norm_row(const cpu::Kernels &kernels, Values out, Values in, Values weight, Values bias,
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

void rms_norm_cpu(const device::Stream &stream, const Tensor &out, const Tensor &in,
                  const Tensor &weight, float epsilon) {
    const int64_t n = in.size(0);
    const int64_t d = in.size(1);
    const cpu::Kernels &kernels = cpu::kernels();
    cpu::for_rows(stream, n, 2 * d, [&](int64_t first, int64_t last) {
        for (int64_t i = first; i < last; ++i) {
            norm_row(kernels, cpu::row_of(out, i), cpu::row_of(in, i), cpu::values_of(weight), d,
                     epsilon);
        }
    });
}

void add_rms_norm_cpu(const device::Stream &stream, const Tensor &out, const Tensor &residual,
                      const Tensor &in, const Tensor &weight, float epsilon) {
    const int64_t n = in.size(0);
    const int64_t d = in.size(1);
    const cpu::Kernels &kernels = cpu::kernels();
    cpu::for_rows(stream, n, 3 * d, [&](int64_t first, int64_t last) {
        for (int64_t i = first; i < last; ++i) {
            const Values sum = cpu::row_of(residual, i);
            add_row(kernels, sum, cpu::row_of(in, i), d);
            norm_row(kernels, cpu::row_of(out, i), sum, cpu::values_of(weight), d, epsilon);
        }
    });
}

void layer_norm_cpu(const device::Stream &stream, const Tensor &out, const Tensor &in,
                    const Tensor &weight, const Tensor *bias, float epsilon) {
    const int64_t d = in.size(1);
    const cpu::Kernels &kernels = cpu::kernels();
    const Values shift = bias == nullptr ? cpu::values_of(nullptr) : cpu::values_of(*bias);
    cpu::for_rows(stream, in.size(0), 3 * d, [&](int64_t first, int64_t last) {
        for (int64_t i = first; i < last; ++i) {
            layer_norm_row(kernels, cpu::row_of(out, i), cpu::row_of(in, i), cpu::values_of(weight),
                           shift, d, epsilon);
        }
    });
}

} // namespace llaisys::ops
