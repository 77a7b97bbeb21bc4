#include "ops/glu/op.hpp"

#include "ops/checks.hpp"

namespace llaisys::ops {

void glu(const device::Stream &stream, const Tensor &out, const Tensor &gate, const Tensor *up,
         Activation activation) {
    const bool is_silu = activation == Activation::silu;
    const Checks check{is_silu ? "swiglu" : "geglu", stream};
    check.real_rows("gate", gate, 2);
    const int64_t n = gate.size(0);
    const int64_t d = gate.size(1);
    require(up != nullptr || !is_silu, "swiglu: up: got none, expected a tensor");
    if (up != nullptr) {
        check.real_rows("up", *up, {n, d});
    }
    check.real_output("out", out, {n, d});
    check.dispatch(LLAISYS_KERNELS(glu), out, gate, up, activation);
}

} // namespace llaisys::ops
