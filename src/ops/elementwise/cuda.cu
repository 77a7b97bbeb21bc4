// out = a + b; out = x * factor, or soft_cap * tanh(x * factor / soft_cap). One value per thread;
// memory-bound.
#include "ops/elementwise/op.hpp"

#include "ops/cuda/common.cuh"

namespace llaisys::ops {

namespace {

constexpr int kThreads = 256;

__global__ void add_kernel(cuda::Reals out, cuda::Reals a, cuda::Reals b, int64_t n) {
    cuda::grid_dependency_wait();
    const int64_t i = int64_t(blockIdx.x) * kThreads + threadIdx.x;
    if (i < n) {
        out.store(i, a.load(i) + b.load(i));
    }
}

__global__ void scale_kernel(cuda::Reals out, int64_t ldo, cuda::Reals in, int64_t ldi, int64_t d,
                             float factor, float soft_cap) {
    cuda::grid_dependency_wait();
    const int64_t row = blockIdx.y;
    const int64_t i = int64_t(blockIdx.x) * kThreads + threadIdx.x;
    if (i < d) {
        const float x = in.load(row * ldi + i) * factor;
        out.store(row * ldo + i, soft_cap == 0 ? x : soft_cap * tanhf(x / soft_cap));
    }
}

} // namespace

void add_cuda(const device::Stream &stream, const Tensor &out, const Tensor &a, const Tensor &b) {
    const int64_t n = out.elements();
    if (n > 0) {
        cuda::launch(device::cuda_stream_of(stream), add_kernel, cuda::ceil_div(n, kThreads),
                     kThreads, 0, true, cuda::reals(out), cuda::reals(a), cuda::reals(b), n);
    }
}

void scale_cuda(const device::Stream &stream, const Tensor &out, const Tensor &in, float factor,
                float soft_cap) {
    if (in.elements() == 0) {
        return;
    }
    const dim3 grid(cuda::ceil_div(in.size(1), kThreads), unsigned(in.size(0)));
    cuda::launch(device::cuda_stream_of(stream), scale_kernel, grid, kThreads, 0, true,
                 cuda::reals(out), out.stride(0), cuda::reals(in), in.stride(0), in.size(1), factor,
                 soft_cap);
}

} // namespace llaisys::ops
