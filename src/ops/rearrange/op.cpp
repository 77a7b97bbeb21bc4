#include "ops/rearrange/op.hpp"

#include "ops/checks.hpp"
#include "ops/rearrange/cpu.hpp"
#include "ops/rearrange/cuda.hpp"

namespace llaisys::ops {

void rearrange(const device::Stream &stream, const Tensor &out, const Tensor &in) {
    const Checks check{"rearrange", stream};
    check.device("in", in);
    check.device("out", out);
    check.writable("out", out);
    check.dtype("out", out, in.dtype());
    if (out.shape() != in.shape()) {
        fail(LLAISYS_ERROR_INVALID, "rearrange: out: got shape ", out.shape().text(),
             ", expected that of in ", in.shape().text());
    }
    switch (stream.type()) {
    case LLAISYS_DEVICE_CPU:
        return rearrange_cpu(stream, out, in);
#if defined(LLAISYS_HAVE_CUDA)
    case LLAISYS_DEVICE_NVIDIA:
        return rearrange_cuda(stream, out, in);
#endif
    default:
        check.no_kernel();
    }
}

Tensor contiguous(const device::Stream &stream, const Tensor &tensor) {
    if (tensor.is_contiguous()) {
        return tensor;
    }
    const Tensor copy =
        Tensor::create(tensor.shape(), tensor.dtype(), stream.type(), stream.device_id());
    rearrange(stream, copy, tensor);
    return copy;
}

} // namespace llaisys::ops
