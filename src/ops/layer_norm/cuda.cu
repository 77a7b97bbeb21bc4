// Layer norm: out = (x - mean) / sqrt(variance + epsilon) * weight + bias. One block per row, which
// is read three times (from L2 after the first). Memory-bound.
#include "ops/layer_norm/op.hpp"

#include "ops/cuda/common.cuh"

namespace llaisys::ops {

namespace {

constexpr int kThreads = 256;

struct Rows {
    cuda::Reals values;
    int64_t stride;
};

__global__ void layer_norm_kernel(Rows out, Rows x, cuda::Reals weight, cuda::Reals bias, int64_t d,
                                  float epsilon) {
    __shared__ float scratch[kThreads / cuda::kWarpSize];
    cuda::grid_dependency_wait();
    cuda::launch_dependents();
    const int64_t row = blockIdx.x;
    const int64_t from = row * x.stride;
    float sum = 0;
    for (int64_t i = threadIdx.x; i < d; i += kThreads) {
        sum += x.values.load(from + i);
    }
    const float mean = cuda::block_sum<kThreads>(sum, scratch) / float(d);
    float squares = 0;
    for (int64_t i = threadIdx.x; i < d; i += kThreads) {
        const float centred = x.values.load(from + i) - mean;
        squares += centred * centred;
    }
    squares = cuda::block_sum<kThreads>(squares, scratch);
    const float factor = 1.0f / sqrtf(squares / float(d) + epsilon);
    for (int64_t i = threadIdx.x; i < d; i += kThreads) {
        const float value = (x.values.load(from + i) - mean) * factor * weight.load(i);
        out.values.store(row * out.stride + i,
                         value + (bias.data != nullptr ? bias.load(i) : 0.0f));
    }
}

} // namespace

void layer_norm_cuda(const device::Stream &stream, const Tensor &out, const Tensor &in,
                     const Tensor &weight, const Tensor *bias, float epsilon) {
    if (in.size(0) == 0) {
        return;
    }
    cuda::launch(device::cuda_stream_of(stream), layer_norm_kernel, unsigned(in.size(0)), kThreads,
                 0, true, Rows{cuda::reals(out), out.stride(0)},
                 Rows{cuda::reals(in), in.stride(0)}, cuda::reals(weight), cuda::reals(bias),
                 in.size(1), epsilon);
}

} // namespace llaisys::ops
