#include "ops/topk/op.hpp"

#include "ops/checks.hpp"
#include "ops/topk/cpu.hpp"
#include "ops/topk/cuda.hpp"

#include <limits>

namespace llaisys::ops {

void topk(const device::Stream &stream, const Tensor &index, const Tensor &value,
          const Tensor &values) {
    const Checks check{"topk", stream};
    check.real_rows("values", values, 2);
    check.dtype("values", values, LLAISYS_DTYPE_F32);
    check.contiguous("values", values);
    const int64_t rows = values.size(0);
    const int64_t n = values.size(1);
    check.real_output("value", value, 2);
    check.dtype("value", value, LLAISYS_DTYPE_F32);
    check.contiguous("value", value);
    const int64_t k = value.size(1);
    check.shape("value", value, {rows, k});
    if (k < 1 || k > n || n > std::numeric_limits<int32_t>::max()) {
        fail(LLAISYS_ERROR_INVALID, "topk: value: got k = ", k, ", expected 1 <= k <= ", n);
    }
    check.device("index", index);
    check.dtype("index", index, LLAISYS_DTYPE_I32);
    check.shape("index", index, {rows, k});
    check.contiguous("index", index);
    check.writable("index", index);
    switch (stream.type()) {
    case LLAISYS_DEVICE_CPU:
        return topk_cpu(stream, index, value, values);
#if defined(LLAISYS_HAVE_CUDA)
    case LLAISYS_DEVICE_NVIDIA:
        return topk_cuda(stream, index, value, values);
#endif
    default:
        check.no_kernel();
    }
}

} // namespace llaisys::ops
