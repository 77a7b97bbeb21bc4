#include "ops/layer_norm/op.hpp"

#include "ops/checks.hpp"
#include "ops/layer_norm/cpu.hpp"
#include "ops/layer_norm/cuda.hpp"

namespace llaisys::ops {

void layer_norm(const device::Stream &stream, const Tensor &out, const Tensor &in,
                const Tensor &weight, const Tensor *bias, float epsilon) {
    const Checks check{"layer_norm", stream};
    check.real_rows("in", in, 2);
    const int64_t n = in.size(0);
    const int64_t d = in.size(1);
    check.real_output("out", out, 2);
    check.shape("out", out, {n, d});
    check.real_rows("weight", weight, 1);
    check.shape("weight", weight, {d});
    if (bias != nullptr) {
        check.real_rows("bias", *bias, 1);
        check.shape("bias", *bias, {d});
    }
    switch (stream.type()) {
    case LLAISYS_DEVICE_CPU:
        return layer_norm_cpu(stream, out, in, weight, bias, epsilon);
#if defined(LLAISYS_HAVE_CUDA)
    case LLAISYS_DEVICE_NVIDIA:
        return layer_norm_cuda(stream, out, in, weight, bias, epsilon);
#endif
    default:
        check.no_kernel();
    }
}

} // namespace llaisys::ops
