#include "ops/scale/op.hpp"

#include "ops/cpu/rows.hpp"

namespace llaisys::ops {

void scale_cpu(const device::Stream &stream, const Tensor &out, const Tensor &in, float factor,
               float soft_cap) {
    using cpu::kPiece;
    const int64_t d = in.size(1);
    const cpu::Kernels &kernels = cpu::kernels();
    const int64_t pieces = (d + kPiece - 1) / kPiece;
    const int64_t work = soft_cap == 0 ? kPiece : 4 * kPiece;
    cpu::for_rows(stream, in.size(0) * pieces, work, [&](int64_t first, int64_t last) {
        float buffer[kPiece];
        for (int64_t item = first; item < last; ++item) {
            const int64_t i = item / pieces;
            const int64_t c = item % pieces * kPiece;
            const int64_t n = std::min(kPiece, d - c);
            std::byte *to = cpu::at(cpu::row_of(out, i), out.dtype(), c);
            const std::byte *from = cpu::at(cpu::row_of(in, i), in.dtype(), c);
            float *values = cpu::target(to, out.dtype(), buffer);
            const float *x = cpu::read(kernels, from, in.dtype(), buffer, n);
            if (x != values) {
                std::memcpy(values, x, size_t(n) * sizeof(float));
            }
            if (factor != 1.0f) {
                kernels.scale_in_place(values, factor, n);
            }
            if (soft_cap != 0) {
                kernels.soft_cap(values, soft_cap, n);
            }
            cpu::finish(kernels, to, out.dtype(), values, n);
        }
    });
}

} // namespace llaisys::ops
