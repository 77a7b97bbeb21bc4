#include "ops/add/op.hpp"

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

} // namespace llaisys::ops
