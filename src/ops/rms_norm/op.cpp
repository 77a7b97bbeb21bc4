#include "ops/rms_norm/op.hpp"

#include "ops/checks.hpp"
#include "ops/rms_norm/cpu.hpp"
#include "ops/rms_norm/cuda.hpp"

namespace llaisys::ops {

namespace {

void check_weight(const Checks &check, const Tensor &weight, int64_t d) {
    check.real_rows("weight", weight, 1);
    check.shape("weight", weight, {d});
}

} // namespace

void rms_norm(const device::Stream &stream, const Tensor &out, const Tensor &in,
              const Tensor &weight, float epsilon) {
    const Checks check{"rms_norm", stream};
    check.real_rows("in", in, 2);
    const int64_t n = in.size(0);
    const int64_t d = in.size(1);
    check.real_output("out", out, 2);
    check.shape("out", out, {n, d});
    check_weight(check, weight, d);
    switch (stream.type()) {
    case LLAISYS_DEVICE_CPU:
        return rms_norm_cpu(stream, out, in, weight, epsilon);
#if defined(LLAISYS_HAVE_CUDA)
    case LLAISYS_DEVICE_NVIDIA:
        return rms_norm_cuda(stream, out, in, weight, epsilon);
#endif
    default:
        check.no_kernel();
    }
}

void add_rms_norm(const device::Stream &stream, const Tensor &out, const Tensor &residual,
                  const Tensor &in, const Tensor &weight, float epsilon) {
    const Checks check{"add_rms_norm", stream};
    check.real_rows("in", in, 2);
    const int64_t n = in.size(0);
    const int64_t d = in.size(1);
    check.real_output("residual", residual, 2);
    check.shape("residual", residual, {n, d});
    check.real_output("out", out, 2);
    check.shape("out", out, {n, d});
    check_weight(check, weight, d);
    switch (stream.type()) {
    case LLAISYS_DEVICE_CPU:
        return add_rms_norm_cpu(stream, out, residual, in, weight, epsilon);
#if defined(LLAISYS_HAVE_CUDA)
    case LLAISYS_DEVICE_NVIDIA:
        return add_rms_norm_cuda(stream, out, residual, in, weight, epsilon);
#endif
    default:
        check.no_kernel();
    }
}

} // namespace llaisys::ops
