// Softmax of each row. One block per row, three passes; memory-bound.
#include "ops/softmax/op.hpp"

#include "ops/cuda/common.cuh"

#include <cmath>

namespace llaisys::ops {

namespace {

constexpr int kThreads = 512;

__global__ void softmax_kernel(float *out, cuda::Reals in, int64_t n) {
    __shared__ float scratch[kThreads / cuda::kWarpSize];
    cuda::grid_dependency_wait();
    const int64_t row = blockIdx.x;
    float max = -INFINITY;
    for (int64_t i = threadIdx.x; i < n; i += kThreads) {
        max = fmaxf(max, in.load(row * n + i));
    }
    max = cuda::block_max<kThreads>(max, scratch);
    if (max == -INFINITY) {
        for (int64_t i = threadIdx.x; i < n; i += kThreads) {
            out[row * n + i] = 0;
        }
        return;
    }
    float sum = 0;
    for (int64_t i = threadIdx.x; i < n; i += kThreads) {
        const float weight = expf(in.load(row * n + i) - max);
        out[row * n + i] = weight; // out may alias in: each thread reads only what it writes
        sum += weight;
    }
    const float factor = 1.0f / cuda::block_sum<kThreads>(sum, scratch);
    for (int64_t i = threadIdx.x; i < n; i += kThreads) {
        out[row * n + i] *= factor;
    }
}

} // namespace

void softmax_cuda(const device::Stream &stream, const Tensor &out, const Tensor &in) {
    if (in.elements() > 0) {
        cuda::launch(device::cuda_stream_of(stream), softmax_kernel, unsigned(in.size(0)), kThreads,
                     0, true, out.as<float>(), cuda::reals(in), in.size(1));
    }
}

} // namespace llaisys::ops
