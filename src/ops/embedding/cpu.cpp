#include "ops/embedding/op.hpp"

#include "ops/cpu/rows.hpp"

namespace llaisys::ops {

void embedding_cpu(const device::Stream &stream, const Tensor &out, const Tensor &index,
                   const Tensor &table) {
    const int64_t n = out.size(0);
    const int64_t d = out.size(1);
    const cpu::Kernels &kernels = cpu::kernels();
    cpu::for_rows(stream, n, d, [&](int64_t first, int64_t last) {
        for (int64_t i = first; i < last; ++i) {
            const int64_t row = index.as<int64_t>()[i];
            cpu::convert(kernels, cpu::at(out.data(), out.dtype(), i * d), out.dtype(),
                         cpu::at(table.data(), table.dtype(), row * d), table.dtype(), d);
        }
    });
}

} // namespace llaisys::ops
