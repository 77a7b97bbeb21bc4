// Gated activations: out = up * gate / (1 + exp(-gate)), or up * gelu(gate), where gelu(x) = x / (1 +
// exp(-2 sqrt(2 / pi) (x + 0.044715 x^3))), which equals the tanh approximation, or x (1 + erf(x /
// sqrt(2))) / 2. SwiGLU: eight values per thread when all tensors have one 16-bit dtype and are
// 16-byte aligned. Memory-bound.
#include "ops/glu/op.hpp"

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
    const float gelu = is_erf ? 0.5f * x * erfcf(-0.70710678f * x)
                              : x / (1.0f + expf(-kTwiceRoot * (x + 0.044715f * x * x * x)));
    out.store(row * ldo + i, gelu * (up.data != nullptr ? up.load(row * ldu + i) : 1.0f));
}

// Whether swiglu_rows.cuh supports these.
bool is_wide(const Tensor &out, const Tensor &gate, const Tensor &up) {
    const DType dtype = out.dtype();
    return dtype != LLAISYS_DTYPE_F32 && gate.dtype() == dtype && up.dtype() == dtype &&
           gate.size(1) % 8 == 0 && has_aligned_rows(out) && has_aligned_rows(gate) &&
           has_aligned_rows(up);
}

} // namespace

void glu_cuda(const device::Stream &stream, const Tensor &out, const Tensor &gate, const Tensor *up,
              Activation activation) {
    if (gate.elements() == 0) {
        return;
    }
    const device::CudaStream &on = device::cuda_stream_of(stream);
    const bool is_silu = activation == Activation::silu;
    if (is_silu && is_wide(out, gate, *up)) {
        return cuda::dispatch_half(out.dtype(), [&](auto type) {
            using T = decltype(type);
            cuda::swiglu_rows<T>(on, reinterpret_cast<T *>(out.data()), out.stride(0),
                                 reinterpret_cast<const T *>(gate.data()), gate.stride(0),
                                 reinterpret_cast<const T *>(up->data()), up->stride(0),
                                 gate.size(0), gate.size(1));
        });
    }
    const dim3 grid(cuda::ceil_div(gate.size(1), kThreads), unsigned(gate.size(0)));
    const int64_t ldu = up != nullptr ? up->stride(0) : 0;
    if (is_silu) {
        return cuda::launch(on, swiglu_kernel, grid, kThreads, 0, true, cuda::reals(out),
                            out.stride(0), cuda::reals(gate), gate.stride(0), cuda::reals(up), ldu,
                            gate.size(1));
    }
    cuda::launch(on, geglu_kernel, grid, kThreads, 0, true, cuda::reals(out), out.stride(0),
                 cuda::reals(gate), gate.stride(0), cuda::reals(up), ldu, gate.size(1),
                 activation == Activation::gelu_erf);
}

} // namespace llaisys::ops
