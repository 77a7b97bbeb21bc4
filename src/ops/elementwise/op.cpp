#include "ops/elementwise/op.hpp"

#include "ops/checks.hpp"

namespace llaisys::ops {

void add(const device::Stream &stream, const Tensor &out, const Tensor &a, const Tensor &b) {
    const Checks check{"add", stream};
    check.device("out", out);
    check.real("out", out);
    check.contiguous("out", out);
    check.writable("out", out);
    const auto check_input = [&](const char *name, const Tensor &input) {
        check.device(name, input);
        check.real(name, input);
        require(input.shape() == out.shape(), "add: ", name, ": got shape ", input.shape(),
                ", expected that of out ", out.shape());
        check.contiguous(name, input);
    };
    check_input("a", a);
    check_input("b", b);
    check.dispatch(LLAISYS_KERNELS(add), out, a, b);
}

void scale(const device::Stream &stream, const Tensor &out, const Tensor &in, float factor,
           float soft_cap) {
    const Checks check{"scale", stream};
    check.real_rows("in", in, 2);
    check.real_output("out", out, {in.size(0), in.size(1)});
    require(soft_cap >= 0, "scale: soft_cap: got ", soft_cap, ", expected at least 0");
    check.dispatch(LLAISYS_KERNELS(scale), out, in, factor, soft_cap);
}

} // namespace llaisys::ops
