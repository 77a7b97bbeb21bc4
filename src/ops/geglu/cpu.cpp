#include "ops/geglu/op.hpp"

#include "ops/cpu/rows.hpp"

namespace llaisys::ops {

void geglu_cpu(const device::Stream &stream, const Tensor &out, const Tensor &gate,
               const Tensor *up, bool is_erf) {
    using cpu::kPiece;
    const int64_t d = gate.size(1);
    const cpu::Kernels &kernels = cpu::kernels();
    const auto run = is_erf ? kernels.geglu_erf : kernels.geglu;
    const int64_t pieces =
        (d + kPiece - 1) / kPiece; // so that several threads can share a long row
    cpu::for_rows(stream, gate.size(0) * pieces, 4 * kPiece, [&](int64_t first, int64_t last) {
        float buffers[2][kPiece];
        for (int64_t item = first; item < last; ++item) {
            const int64_t i = item / pieces;
            const int64_t c = item % pieces * kPiece;
            const int64_t n = std::min(kPiece, d - c);
            std::byte *to = cpu::at(cpu::row_of(out, i), out.dtype(), c);
            const std::byte *g = cpu::at(cpu::row_of(gate, i), gate.dtype(), c);
            const float *factors = nullptr;
            if (up != nullptr) {
                factors = cpu::read(kernels, cpu::at(cpu::row_of(*up, i), up->dtype(), c),
                                    up->dtype(), buffers[1], n);
            }
            float *values = cpu::target(to, out.dtype(), buffers[0]);
            run(values, cpu::read(kernels, g, gate.dtype(), buffers[0], n), factors, n);
            cpu::finish(kernels, to, out.dtype(), values, n);
        }
    });
}

} // namespace llaisys::ops
