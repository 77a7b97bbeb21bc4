// SwiGLU: out = up * gate / (1 + exp(-gate)). Eight values per thread when all tensors have one
// 16-bit dtype and are 16-byte aligned; memory-bound.
#include "ops/swiglu/op.hpp"

#include "ops/cuda/dispatch.cuh"
#include "ops/cuda/swiglu_rows.cuh"

namespace llaisys::ops {

namespace {

using cuda::has_aligned_rows;

constexpr int kThreads = 256;

__global__ void swiglu_kernel(cuda::Reals out, int64_t ldo, cuda::Reals gate, int64_t ldg,
                              cuda::Reals up, int64_t ldu, int64_t d) {
    cuda::grid_dependency_wait();
    const int64_t row = blockIdx.y;
    const int64_t i = int64_t(blockIdx.x) * kThreads + threadIdx.x;
    if (i < d) {
        out.store(row * ldo + i, cuda::swiglu(gate.load(row * ldg + i), up.load(row * ldu + i)));
    }
}

} // namespace

void swiglu_cuda(const device::Stream &stream, const Tensor &out, const Tensor &gate,
                 const Tensor &up) {
    if (gate.elements() == 0) {
        return;
    }
    const DType dtype = out.dtype();
    if (dtype != LLAISYS_DTYPE_F32 && gate.dtype() == dtype && up.dtype() == dtype &&
        gate.size(1) % 8 == 0 && has_aligned_rows(out) && has_aligned_rows(gate) &&
        has_aligned_rows(up)) {
        return cuda::dispatch_half(dtype, [&](auto type) {
            using T = decltype(type);
            cuda::swiglu_rows<T>(device::cuda_stream_of(stream), reinterpret_cast<T *>(out.data()),
                                 out.stride(0), reinterpret_cast<const T *>(gate.data()),
                                 gate.stride(0), reinterpret_cast<const T *>(up.data()),
                                 up.stride(0), gate.size(0), gate.size(1));
        });
    }
    const dim3 grid(cuda::ceil_div(gate.size(1), kThreads), unsigned(gate.size(0)));
    cuda::launch(device::cuda_stream_of(stream), swiglu_kernel, grid, kThreads, 0, true,
                 cuda::reals(out), out.stride(0), cuda::reals(gate), gate.stride(0),
                 cuda::reals(up), up.stride(0), gate.size(1));
}

} // namespace llaisys::ops
