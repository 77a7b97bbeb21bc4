#include "ops/embedding/op.hpp"

#include "ops/checks.hpp"
#include "ops/embedding/cpu.hpp"
#include "ops/embedding/cuda.hpp"

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
    switch (stream.type()) {
    case LLAISYS_DEVICE_CPU:
        return embedding_cpu(stream, out, index, table);
#if defined(LLAISYS_HAVE_CUDA)
    case LLAISYS_DEVICE_NVIDIA:
        return embedding_cuda(stream, out, index, table);
#endif
    default:
        check.no_kernel();
    }
}

} // namespace llaisys::ops
