#include "ops/swiglu/op.hpp"

#include "ops/checks.hpp"
#include "ops/swiglu/cpu.hpp"
#include "ops/swiglu/cuda.hpp"

namespace llaisys::ops {

void swiglu(const device::Stream &stream, const Tensor &out, const Tensor &gate, const Tensor &up) {
    const Checks check{"swiglu", stream};
    check.real_rows("gate", gate, 2);
    const int64_t n = gate.size(0);
    const int64_t d = gate.size(1);
    check.real_rows("up", up, 2);
    check.shape("up", up, {n, d});
    check.real_output("out", out, 2);
    check.shape("out", out, {n, d});
    switch (stream.type()) {
    case LLAISYS_DEVICE_CPU:
        return swiglu_cpu(stream, out, gate, up);
#if defined(LLAISYS_HAVE_CUDA)
    case LLAISYS_DEVICE_NVIDIA:
        return swiglu_cuda(stream, out, gate, up);
#endif
    default:
        check.no_kernel();
    }
}

} // namespace llaisys::ops
