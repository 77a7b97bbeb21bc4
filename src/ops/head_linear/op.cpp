#include "ops/head_linear/op.hpp"

#include "ops/checks.hpp"

namespace llaisys::ops {

void head_linear(const device::Stream &stream, const Tensor &out, const Tensor &in,
                 const ExpertWeights &weights) {
    const Checks check{"head_linear", stream};
    require(weights.defined(), "head_linear: weights: got none, expected one per head");
    if (weights.all.defined()) { // stored by rows: the kernel reads the bytes, not quantised ones
        check.real("weights", weights.all.bytes);
    }
    check.real_rows("in", in, {in.size(0), weights.count, weights.in_features});
    check.real_output("out", out, {in.size(0), weights.count, weights.out_features});
    if (in.size(0) == 0) {
        return;
    }
    check.dispatch(LLAISYS_KERNELS(head_linear), out, in, weights);
}

} // namespace llaisys::ops
