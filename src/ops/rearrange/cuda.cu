// Copies between strided layouts of up to LLAISYS_MAX_DIMS dimensions. One thread per element;
// memory-bound when both sides are contiguous in the last dimension.
#include "ops/rearrange/op.hpp"

#include "ops/cuda/common.cuh"

namespace llaisys::ops {

namespace {

constexpr int kThreads = 256;

struct Layout {
    int64_t sizes[LLAISYS_MAX_DIMS];
    int64_t out[LLAISYS_MAX_DIMS]; // strides
    int64_t in[LLAISYS_MAX_DIMS];
    int ndim;
};

template <typename Unit>
__global__ void rearrange_kernel(Unit *out, const Unit *in, Layout layout, int64_t n) {
    cuda::grid_dependency_wait();
    int64_t left = int64_t(blockIdx.x) * kThreads + threadIdx.x;
    if (left >= n) {
        return;
    }
    int64_t to = 0;
    int64_t from = 0;
    for (int dim = layout.ndim - 1; dim >= 0; --dim) {
        const int64_t at = left % layout.sizes[dim];
        left /= layout.sizes[dim];
        to += at * layout.out[dim];
        from += at * layout.in[dim];
    }
    out[to] = in[from];
}

template <typename Unit>
void run(const device::Stream &stream, const Tensor &out, const Tensor &in, const Layout &layout) {
    cuda::launch(device::cuda_stream_of(stream), rearrange_kernel<Unit>,
                 cuda::ceil_div(in.elements(), kThreads), kThreads, 0, true,
                 reinterpret_cast<Unit *>(out.data()), reinterpret_cast<const Unit *>(in.data()),
                 layout, in.elements());
}

} // namespace

void rearrange_cuda(const device::Stream &stream, const Tensor &out, const Tensor &in) {
    if (in.elements() == 0) {
        return;
    }
    Layout layout{};
    layout.ndim = in.ndim();
    for (int dim = 0; dim < in.ndim(); ++dim) {
        layout.sizes[dim] = in.size(dim);
        layout.out[dim] = out.stride(dim);
        layout.in[dim] = in.stride(dim);
    }
    switch (traits_of(in.dtype()).block_bytes) {
    case 1:
        return run<uint8_t>(stream, out, in, layout);
    case 2:
        return run<uint16_t>(stream, out, in, layout);
    case 4:
        return run<uint32_t>(stream, out, in, layout);
    case 8:
        return run<uint64_t>(stream, out, in, layout);
    default:
        ensure(false, "rearrange of ", name_of(in.dtype()));
    }
}

} // namespace llaisys::ops
