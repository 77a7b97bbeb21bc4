#include "ops/swiglu/op.hpp"

#include "ops/cpu/rows.hpp"

namespace llaisys::ops {

void swiglu_cpu(const device::Stream &stream, const Tensor &out, const Tensor &gate,
                const Tensor &up) {
    const cpu::Kernels &kernels = cpu::kernels();
    cpu::for_pieces(stream, gate.size(0), gate.size(1), 4, [&](int64_t i, int64_t c, int64_t n) {
        float buffers[2][cpu::kPiece];
        const cpu::Values to = cpu::row_of(out, i).from(c);
        float *values = cpu::target(to, buffers[0]);
        kernels.swiglu(values, cpu::read(kernels, cpu::row_of(gate, i).from(c), buffers[0], n),
                       cpu::read(kernels, cpu::row_of(up, i).from(c), buffers[1], n), n);
        cpu::finish(kernels, to, values, n);
    });
}

} // namespace llaisys::ops
