// out = a + b, elementwise. One thread per value; memory-bound.
#include "ops/add/op.hpp"

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

} // namespace

void add_cuda(const device::Stream &stream, const Tensor &out, const Tensor &a, const Tensor &b) {
    const int64_t n = out.elements();
    if (n > 0) {
        cuda::launch(device::cuda_stream_of(stream), add_kernel, cuda::ceil_div(n, kThreads),
                     kThreads, 0, true, cuda::reals(out), cuda::reals(a), cuda::reals(b), n);
    }
}

} // namespace llaisys::ops
