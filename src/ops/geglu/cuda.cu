// GeGLU: out = up * gelu(gate), gelu(x) = x / (1 + exp(-2 sqrt(2 / pi) (x + 0.044715 x^3))), which
// equals the tanh approximation, or x (1 + erf(x / sqrt(2))) / 2. One value per thread;
// memory-bound.
#include "ops/geglu/op.hpp"

#include "ops/cuda/common.cuh"

namespace llaisys::ops {

namespace {

constexpr int kThreads = 256;

__global__ void geglu_kernel(cuda::Reals out, int64_t ldo, cuda::Reals gate, int64_t ldg,
                             cuda::Reals up, int64_t ldu, int64_t d, bool is_erf) {
    cuda::grid_dependency_wait();
    const int64_t row = blockIdx.y;
    const int64_t i = int64_t(blockIdx.x) * kThreads + threadIdx.x;
    if (i >= d) {
        return;
    }
    constexpr float kTwiceRoot = 1.5957691216057308f; // 2 sqrt(2 / pi)
    const float x = gate.load(row * ldg + i);
    const float gelu = is_erf ? 0.5f * x * (1.0f + erff(x * 0.70710678f))
                              : x / (1.0f + expf(-kTwiceRoot * (x + 0.044715f * x * x * x)));
    out.store(row * ldo + i, gelu * (up.data != nullptr ? up.load(row * ldu + i) : 1.0f));
}

} // namespace

void geglu_cuda(const device::Stream &stream, const Tensor &out, const Tensor &gate,
                const Tensor *up, bool is_erf) {
    if (gate.elements() == 0) {
        return;
    }
    const dim3 grid(cuda::ceil_div(gate.size(1), kThreads), unsigned(gate.size(0)));
    cuda::launch(device::cuda_stream_of(stream), geglu_kernel, grid, kThreads, 0, true,
                 cuda::reals(out), out.stride(0), cuda::reals(gate), gate.stride(0),
                 cuda::reals(up), up != nullptr ? up->stride(0) : 0, gate.size(1), is_erf);
}

} // namespace llaisys::ops
