#include "ops/embedding/op.hpp"

#include "ops/checks.hpp"

namespace llaisys::ops {

void embedding(const device::Stream &stream, const Tensor &out, const Tensor &index,
               const Tensor &table) {
    const Checks check{"embedding", stream};
    check.real_rows("table", table, 2);
    check.contiguous("table", table);
    const int64_t n = out.size(0);
    check.real_output("out", out, {n, table.size(1)});
    check.contiguous("out", out);
    check.vector("index", index, LLAISYS_DTYPE_I64, n);
    check.index_range("index", index, table.size(0));
    check.dispatch(LLAISYS_KERNELS(embedding), out, index, table);
}

} // namespace llaisys::ops
