#include "ops/softmax/op.hpp"

#include "ops/checks.hpp"

namespace llaisys::ops {

void softmax(const device::Stream &stream, const Tensor &out, const Tensor &in) {
    const Checks check{"softmax", stream};
    check.real_rows("in", in, 2);
    check.contiguous("in", in);
    check.dense("out", out, LLAISYS_DTYPE_F32, {in.size(0), in.size(1)});
    check.writable("out", out);
    check.dispatch(LLAISYS_KERNELS(softmax), out, in);
}

} // namespace llaisys::ops
