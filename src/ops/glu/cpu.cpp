#include "ops/glu/op.hpp"

#include "ops/cpu/rows.hpp"

namespace llaisys::ops {

void glu_cpu(const device::Stream &stream, const Tensor &out, const Tensor &gate, const Tensor *up,
             Activation activation) {
    const cpu::Kernels &kernels = cpu::kernels();
    const auto run = activation == Activation::silu        ? kernels.swiglu
                     : activation == Activation::gelu_tanh ? kernels.geglu
                                                           : kernels.geglu_erf;
    cpu::for_pieces(stream, gate.size(0), gate.size(1), 4, [&](int64_t i, int64_t c, int64_t n) {
        float buffers[2][cpu::kPiece];
        const cpu::Values to = cpu::row_of(out, i).from(c);
        const float *factors = nullptr;
        if (up != nullptr) {
            factors = cpu::read(kernels, cpu::row_of(*up, i).from(c), buffers[1], n);
        }
        float *values = cpu::target(to, buffers[0]);
        run(values, cpu::read(kernels, cpu::row_of(gate, i).from(c), buffers[0], n), factors, n);
        cpu::finish(kernels, to, values, n);
    });
}

} // namespace llaisys::ops
