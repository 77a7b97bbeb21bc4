#include "ops/softmax/op.hpp"

#include "ops/checks.hpp"
#include "ops/softmax/cpu.hpp"
#include "ops/softmax/cuda.hpp"

namespace llaisys::ops {

void softmax(const device::Stream &stream, const Tensor &out, const Tensor &in) {
    const Checks check{"softmax", stream};
    check.real_rows("in", in, 2);
    check.contiguous("in", in);
    const int64_t rows = in.size(0);
    const int64_t n = in.size(1);
    check.real_output("out", out, 2);
    check.dtype("out", out, LLAISYS_DTYPE_F32);
    check.shape("out", out, {rows, n});
    check.contiguous("out", out);
    switch (stream.type()) {
    case LLAISYS_DEVICE_CPU:
        return softmax_cpu(stream, out, in);
#if defined(LLAISYS_HAVE_CUDA)
    case LLAISYS_DEVICE_NVIDIA:
        return softmax_cuda(stream, out, in);
#endif
    default:
        check.no_kernel();
    }
}

} // namespace llaisys::ops
