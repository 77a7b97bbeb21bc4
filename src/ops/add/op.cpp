#include "ops/add/op.hpp"

#include "ops/add/cpu.hpp"
#include "ops/add/cuda.hpp"
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
        if (input.shape() != out.shape()) {
            fail(LLAISYS_ERROR_INVALID, "add: ", name, ": got shape ", input.shape().text(),
                 ", expected that of out ", out.shape().text());
        }
        check.contiguous(name, input);
    };
    check_input("a", a);
    check_input("b", b);
    switch (stream.type()) {
    case LLAISYS_DEVICE_CPU:
        return add_cpu(stream, out, a, b);
#if defined(LLAISYS_HAVE_CUDA)
    case LLAISYS_DEVICE_NVIDIA:
        return add_cuda(stream, out, a, b);
#endif
    default:
        check.no_kernel();
    }
}

} // namespace llaisys::ops
