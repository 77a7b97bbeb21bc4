#include "ops/head_linear/op.hpp"

#include "ops/checks.hpp"
#include "ops/head_linear/cpu.hpp"
#include "ops/head_linear/cuda.hpp"

namespace llaisys::ops {

void head_linear(const device::Stream &stream, const Tensor &out, const Tensor &in,
                 const ExpertWeights &weights) {
    const Checks check{"head_linear", stream};
    if (!weights.defined()) {
        fail(LLAISYS_ERROR_INVALID, "head_linear: weights: got none, expected one per head");
    }
    check.real_rows("in", in, 3);
    check.shape("in", in, {in.size(0), weights.count, weights.in_features});
    check.real_output("out", out, 3);
    check.shape("out", out, {in.size(0), weights.count, weights.out_features});
    if (in.size(0) == 0) {
        return;
    }
    switch (stream.type()) {
    case LLAISYS_DEVICE_CPU:
        return head_linear_cpu(stream, out, in, weights);
#if defined(LLAISYS_HAVE_CUDA)
    case LLAISYS_DEVICE_NVIDIA:
        return head_linear_cuda(stream, out, in, weights);
#endif
    default:
        check.no_kernel();
    }
}

} // namespace llaisys::ops
