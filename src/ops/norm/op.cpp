#include "ops/norm/op.hpp"

#include "ops/checks.hpp"

namespace llaisys::ops {

void rms_norm(const device::Stream &stream, const Tensor &out, const Tensor &in,
              const Tensor &weight, float epsilon) {
    const Checks check{"rms_norm", stream};
    check.real_rows("in", in, 2);
    const int64_t n = in.size(0);
    const int64_t d = in.size(1);
    check.real_output("out", out, {n, d});
    check.real_rows("weight", weight, {d});
    check.dispatch(LLAISYS_KERNELS(rms_norm), out, in, weight, epsilon);
}

void add_rms_norm(const device::Stream &stream, const Tensor &out, const Tensor &residual,
                  const Tensor &in, const Tensor &weight, float epsilon) {
    const Checks check{"add_rms_norm", stream};
    check.real_rows("in", in, 2);
    const int64_t n = in.size(0);
    const int64_t d = in.size(1);
    check.real_output("residual", residual, {n, d});
    check.real_output("out", out, {n, d});
    check.real_rows("weight", weight, {d});
    check.dispatch(LLAISYS_KERNELS(add_rms_norm), out, residual, in, weight, epsilon);
}

void layer_norm(const device::Stream &stream, const Tensor &out, const Tensor &in,
                const Tensor &weight, const Tensor *bias, float epsilon) {
    const Checks check{"layer_norm", stream};
    check.real_rows("in", in, 2);
    const int64_t n = in.size(0);
    const int64_t d = in.size(1);
    check.real_output("out", out, {n, d});
    check.real_rows("weight", weight, {d});
    if (bias != nullptr) {
        check.real_rows("bias", *bias, {d});
    }
    check.dispatch(LLAISYS_KERNELS(layer_norm), out, in, weight, bias, epsilon);
}

} // namespace llaisys::ops
