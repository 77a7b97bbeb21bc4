#include "ops/scale/op.hpp"

#include "ops/checks.hpp"
#include "ops/scale/cpu.hpp"
#include "ops/scale/cuda.hpp"

namespace llaisys::ops {

void scale(const device::Stream &stream, const Tensor &out, const Tensor &in, float factor,
           float soft_cap) {
    const Checks check{"scale", stream};
    check.real_rows("in", in, 2);
    check.real_output("out", out, 2);
    check.shape("out", out, {in.size(0), in.size(1)});
    if (!(soft_cap >= 0)) {
        fail(LLAISYS_ERROR_INVALID, "scale: soft_cap: got ", soft_cap, ", expected at least 0");
    }
    switch (stream.type()) {
    case LLAISYS_DEVICE_CPU:
        return scale_cpu(stream, out, in, factor, soft_cap);
#if defined(LLAISYS_HAVE_CUDA)
    case LLAISYS_DEVICE_NVIDIA:
        return scale_cuda(stream, out, in, factor, soft_cap);
#endif
    default:
        check.no_kernel();
    }
}

} // namespace llaisys::ops
