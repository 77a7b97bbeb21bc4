#include "ops/scale/op.hpp"

#include "ops/checks.hpp"

namespace llaisys::ops {

void scale(const device::Stream &stream, const Tensor &out, const Tensor &in, float factor,
           float soft_cap) {
    const Checks check{"scale", stream};
    check.real_rows("in", in, 2);
    check.real_output("out", out, {in.size(0), in.size(1)});
    require(soft_cap >= 0, "scale: soft_cap: got ", soft_cap, ", expected at least 0");
    check.dispatch(LLAISYS_KERNELS(scale), out, in, factor, soft_cap);
}

} // namespace llaisys::ops
