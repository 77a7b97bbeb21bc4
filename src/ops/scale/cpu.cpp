#include "ops/scale/op.hpp"

#include "ops/cpu/rows.hpp"

namespace llaisys::ops {

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
