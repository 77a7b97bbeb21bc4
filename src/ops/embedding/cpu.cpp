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
            cpu::convert(kernels, cpu::values_of(out, i * d),
                         cpu::values_of(table, index.as<int64_t>()[i] * d), d);
        }
    });
}

} // namespace llaisys::ops
