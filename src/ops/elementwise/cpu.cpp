#include "ops/elementwise/op.hpp"

#include "ops/cpu/rows.hpp"

namespace llaisys::ops {

void add_cpu(const device::Stream &stream, const Tensor &out, const Tensor &a, const Tensor &b) {
    const cpu::Kernels &kernels = cpu::kernels();
    cpu::for_pieces(stream, 1, out.elements(), 1, [&](int64_t, int64_t c, int64_t n) {
        float buffers[2][cpu::kPiece];
        const cpu::Values to = cpu::values_of(out, c);
        float *sums = cpu::target(to, buffers[0]);
        kernels.add(sums, cpu::read(kernels, cpu::values_of(a, c), buffers[0], n),
                    cpu::read(kernels, cpu::values_of(b, c), buffers[1], n), n);
        cpu::finish(kernels, to, sums, n);
    });
}

void scale_cpu(const device::Stream &stream, const Tensor &out, const Tensor &in, float factor,
               float soft_cap) {
    const cpu::Kernels &kernels = cpu::kernels();
    const int64_t work = soft_cap == 0 ? 1 : 4;
    cpu::for_pieces(stream, in.size(0), in.size(1), work, [&](int64_t i, int64_t c, int64_t n) {
        float buffer[cpu::kPiece];
        const cpu::Values to = cpu::row_of(out, i).from(c);
        float *values = cpu::target(to, buffer);
        const float *x = cpu::read(kernels, cpu::row_of(in, i).from(c), buffer, n);
        if (x != values) {
            std::memcpy(values, x, size_t(n) * sizeof(float));
        }
        if (factor != 1.0f) {
            kernels.scale_in_place(values, factor, n);
        }
        if (soft_cap != 0) {
            kernels.soft_cap(values, soft_cap, n);
        }
        cpu::finish(kernels, to, values, n);
    });
}

} // namespace llaisys::ops
