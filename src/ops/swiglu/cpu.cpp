#include "ops/swiglu/op.hpp"

#include "ops/cpu/rows.hpp"

namespace llaisys::ops {

namespace {

using cpu::kPiece;

// Columns [begin, end) of row i.
void swiglu_row(const cpu::Kernels &kernels, const Tensor &out, const Tensor &gate,
                const Tensor &up, int64_t i, int64_t begin, int64_t end) {
    float buffers[2][kPiece];
    for (int64_t c = begin; c < end; c += kPiece) {
        const int64_t n = std::min(kPiece, end - c);
        std::byte *to = cpu::at(cpu::row_of(out, i), out.dtype(), c);
        const std::byte *g = cpu::at(cpu::row_of(gate, i), gate.dtype(), c);
        const std::byte *u = cpu::at(cpu::row_of(up, i), up.dtype(), c);
        float *values = cpu::target(to, out.dtype(), buffers[0]);
        kernels.swiglu(values, cpu::read(kernels, g, gate.dtype(), buffers[0], n),
                       cpu::read(kernels, u, up.dtype(), buffers[1], n), n);
        cpu::finish(kernels, to, out.dtype(), values, n);
    }
}

} // namespace

void swiglu_cpu(const device::Stream &stream, const Tensor &out, const Tensor &gate,
                const Tensor &up) {
    const int64_t n = gate.size(0);
    const int64_t d = gate.size(1);
    const cpu::Kernels &kernels = cpu::kernels();
    const int64_t pieces =
        (d + kPiece - 1) / kPiece; // so that several threads can share a long row
    cpu::for_rows(stream, n * pieces, 4 * kPiece, [&](int64_t first, int64_t last) {
        for (int64_t item = first; item < last;) {
            const int64_t begin = item % pieces;
            const int64_t end = std::min(pieces, begin + last - item);
            swiglu_row(kernels, out, gate, up, item / pieces, begin * kPiece,
                       std::min(d, end * kPiece));
            item += end - begin;
        }
    });
}

} // namespace llaisys::ops
