#include "ops/geglu/op.hpp"

#include "ops/checks.hpp"

namespace llaisys::ops {

void geglu(const device::Stream &stream, const Tensor &out, const Tensor &gate, const Tensor *up,
           bool is_erf) {
    const Checks check{"geglu", stream};
    check.real_rows("gate", gate, 2);
    const int64_t n = gate.size(0);
    const int64_t d = gate.size(1);
    if (up != nullptr) {
        check.real_rows("up", *up, {n, d});
    }
    check.real_output("out", out, {n, d});
    check.dispatch(LLAISYS_KERNELS(geglu), out, gate, up, is_erf);
}

} // namespace llaisys::ops
