#include "ops/softmax/op.hpp"

#include "ops/cpu/rows.hpp"

#include <limits>

namespace llaisys::ops {

void softmax_cpu(const device::Stream &stream, const Tensor &out, const Tensor &in) {
    const int64_t rows = in.size(0);
    const int64_t n = in.size(1);
    const cpu::Kernels &kernels = cpu::kernels();
    cpu::for_rows(stream, rows, 4 * n, [&](int64_t first, int64_t last) {
        for (int64_t r = first; r < last; ++r) {
            float *row = out.as<float>() + r * n;
            const cpu::Values from = cpu::values_of(in, r * n);
            if (from.floats() != row) {
                cpu::convert(kernels, cpu::values_of(row), from, n);
            }
            const float max = kernels.max(row, n);
            if (max == -std::numeric_limits<float>::infinity()) {
                std::fill(row, row + n, 0.0f);
            } else {
                const float sum = kernels.exp_sum(row, max, n);
                kernels.scale_in_place(row, 1.0f / sum, n);
            }
        }
    });
}

} // namespace llaisys::ops
