#include "ops/swiglu/op.hpp"

#include "ops/checks.hpp"

namespace llaisys::ops {

void swiglu(const device::Stream &stream, const Tensor &out, const Tensor &gate, const Tensor &up) {
    const Checks check{"swiglu", stream};
    check.real_rows("gate", gate, 2);
    const int64_t n = gate.size(0);
    const int64_t d = gate.size(1);
    check.real_rows("up", up, {n, d});
    check.real_output("out", out, {n, d});
    check.dispatch(LLAISYS_KERNELS(swiglu), out, gate, up);
}

} // namespace llaisys::ops
