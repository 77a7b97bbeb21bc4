#include "ops/add/op.hpp"

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

} // namespace llaisys::ops
