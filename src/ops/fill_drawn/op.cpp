#include "ops/fill_drawn/op.hpp"

#include "ops/checks.hpp"
#include "ops/fill_drawn/cuda.hpp"

namespace llaisys::ops {

namespace {

void fill_drawn_cpu(const Tensor &out, const Tensor &drawn, const Tensor &source) {
    for (int64_t i = 0; i < out.size(0); ++i) {
        const int32_t from = source.as<int32_t>()[i];
        if (from >= 0) {
            out.as<int64_t>()[i] = drawn.as<int64_t>()[from];
        }
    }
}

} // namespace

void fill_drawn(const device::Stream &stream, const Tensor &out, const Tensor &drawn,
                const Tensor &source) {
    const Checks check{"fill_drawn", stream};
    check.vector("out", out, LLAISYS_DTYPE_I64, out.size(0));
    check.writable("out", out);
    check.vector("drawn", drawn, LLAISYS_DTYPE_I64, drawn.size(0));
    check.vector("source", source, LLAISYS_DTYPE_I32, out.size(0));
    switch (stream.type()) {
    case LLAISYS_DEVICE_CPU:
        return fill_drawn_cpu(out, drawn, source);
#if defined(LLAISYS_HAVE_CUDA)
    case LLAISYS_DEVICE_NVIDIA:
        return fill_drawn_cuda(stream, out, drawn, source);
#endif
    default:
        check.no_kernel();
    }
}

} // namespace llaisys::ops
