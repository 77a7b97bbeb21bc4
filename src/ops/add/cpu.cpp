#include "ops/add/op.hpp"

#include "ops/cpu/rows.hpp"

namespace llaisys::ops {

void add_cpu(const device::Stream &stream, const Tensor &out, const Tensor &a, const Tensor &b) {
    const cpu::Kernels &kernels = cpu::kernels();
    const DType dtype = out.dtype();
    const int64_t n = out.elements();
    const int64_t pieces = (n + cpu::kPiece - 1) / cpu::kPiece;
    cpu::for_rows(stream, pieces, cpu::kPiece, [&](int64_t first, int64_t last) {
        float buffers[2][cpu::kPiece];
        for (int64_t i = first * cpu::kPiece; i < std::min(n, last * cpu::kPiece);
             i += cpu::kPiece) {
            const int64_t piece = std::min(cpu::kPiece, n - i);
            std::byte *to = cpu::at(out.data(), dtype, i);
            float *sums = cpu::target(to, dtype, buffers[0]);
            const auto read = [&](const Tensor &in, float *buffer) {
                return cpu::read(kernels, cpu::at(in.data(), in.dtype(), i), in.dtype(), buffer,
                                 piece);
            };
            kernels.add(sums, read(a, buffers[0]), read(b, buffers[1]), piece);
            cpu::finish(kernels, to, dtype, sums, piece);
        }
    });
}

} // namespace llaisys::ops
