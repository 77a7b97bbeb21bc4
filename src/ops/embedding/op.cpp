#include "ops/embedding/op.hpp"

#include "ops/checks.hpp"
#include "ops/cpu/rows.hpp"

namespace llaisys::ops {

void embedding(const device::Stream &stream, const Tensor &out, const Tensor &index,
               const Tensor &table) {
    const Checks check{"embedding", stream};
    check.real_rows("table", table, 2);
    check.contiguous("table", table);
    check.real_output("out", out, 2);
    check.contiguous("out", out);
    const int64_t n = out.size(0);
    const int64_t d = table.size(1);
    check.shape("out", out, {n, d});
    check.vector("index", index, LLAISYS_DTYPE_I64, n);
    check.index_range("index", index, table.size(0));
    check.on_cpu();

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
