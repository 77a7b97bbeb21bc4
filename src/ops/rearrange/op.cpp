#include "ops/rearrange/op.hpp"

#include "ops/checks.hpp"

namespace llaisys::ops {

void rearrange(const device::Stream &stream, const Tensor &out, const Tensor &in) {
    const Checks check{"rearrange", stream};
    check.device("in", in);
    check.device("out", out);
    check.writable("out", out);
    check.dtype("out", out, in.dtype());
    require(out.shape() == in.shape(), "rearrange: out: got shape ", out.shape(),
            ", expected that of in ", in.shape());
    check.dispatch(LLAISYS_KERNELS(rearrange), out, in);
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
