#include "ops/argmax/op.hpp"

#include "ops/argmax/cpu.hpp"
#include "ops/argmax/cuda.hpp"
#include "ops/checks.hpp"

namespace llaisys::ops {

void argmax(const device::Stream &stream, const Tensor &max_index, const Tensor &max_value,
            const Tensor &values, const ArgmaxOnHost &host) {
    const Checks check{"argmax", stream};
    check.real_rows("values", values, 2);
    check.contiguous("values", values);
    const int64_t rows = values.size(0);
    const int64_t n = values.size(1);
    if (n == 0) {
        fail(LLAISYS_ERROR_INVALID, "argmax: values: got shape ", values.shape().text(),
             ", expected at least one column");
    }
    check.vector("max_index", max_index, LLAISYS_DTYPE_I64, rows);
    check.writable("max_index", max_index);
    check.vector("max_value", max_value, values.dtype(), rows);
    check.writable("max_value", max_value);
    switch (stream.type()) {
    case LLAISYS_DEVICE_CPU:
        return argmax_cpu(stream, max_index, max_value, values, host);
#if defined(LLAISYS_HAVE_CUDA)
    case LLAISYS_DEVICE_NVIDIA:
        return argmax_cuda(stream, max_index, max_value, values, host);
#endif
    default:
        check.no_kernel();
    }
}

} // namespace llaisys::ops
