#include "ops/geglu/op.hpp"

#include "ops/checks.hpp"
#include "ops/geglu/cpu.hpp"
#include "ops/geglu/cuda.hpp"

namespace llaisys::ops {

void geglu(const device::Stream &stream, const Tensor &out, const Tensor &gate, const Tensor *up,
           bool is_erf) {
    const Checks check{"geglu", stream};
    check.real_rows("gate", gate, 2);
    const int64_t n = gate.size(0);
    const int64_t d = gate.size(1);
    if (up != nullptr) {
        check.real_rows("up", *up, 2);
        check.shape("up", *up, {n, d});
    }
    check.real_output("out", out, 2);
    check.shape("out", out, {n, d});
    switch (stream.type()) {
    case LLAISYS_DEVICE_CPU:
        return geglu_cpu(stream, out, gate, up, is_erf);
#if defined(LLAISYS_HAVE_CUDA)
    case LLAISYS_DEVICE_NVIDIA:
        return geglu_cuda(stream, out, gate, up, is_erf);
#endif
    default:
        check.no_kernel();
    }
}

} // namespace llaisys::ops
