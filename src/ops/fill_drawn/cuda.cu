// A thread a token; a few hundred at most, so that its launch is all it costs.
#include "ops/fill_drawn/cuda.hpp"

#include "ops/cuda/common.cuh"

namespace llaisys::ops {

namespace {

constexpr int kThreads = 256;

__global__ void fill_drawn_kernel(int64_t *out, const int64_t *drawn, const int32_t *source,
                                  int64_t n) {
    cuda::wait_for_input();
    const int64_t i = int64_t(blockIdx.x) * kThreads + threadIdx.x;
    if (i < n && source[i] >= 0) {
        out[i] = drawn[source[i]];
    }
}

} // namespace

void fill_drawn_cuda(const device::Stream &stream, const Tensor &out, const Tensor &drawn,
                     const Tensor &source) {
    const int64_t n = out.size(0);
    if (n > 0) {
        cuda::launch(device::cuda_stream_of(stream), fill_drawn_kernel,
                     cuda::blocks_for(n, kThreads), kThreads, 0, true, out.as<int64_t>(),
                     drawn.as<int64_t>(), source.as<int32_t>(), n);
    }
}

} // namespace llaisys::ops
