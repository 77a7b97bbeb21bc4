// out = up * gate / (1 + exp(-gate)). Eight values a thread where everything is of one 16-bit dtype
// and lies on 16 bytes; bound by memory.
#include "ops/swiglu/cuda.hpp"

#include "ops/cuda/common.cuh"

namespace llaisys::ops {

namespace {

constexpr int kThreads = 256;

__device__ __forceinline__ float gated(float gate, float up) {
    return up * gate / (1.0f + expf(-gate));
}

__global__ void swiglu_kernel(cuda::Reals out, int64_t ldo, cuda::Reals gate, int64_t ldg,
                              cuda::Reals up, int64_t ldu, int64_t d) {
    cuda::wait_for_input();
    const int64_t row = blockIdx.y;
    const int64_t i = int64_t(blockIdx.x) * kThreads + threadIdx.x;
    if (i < d) {
        out.store(row * ldo + i, gated(gate.load(row * ldg + i), up.load(row * ldu + i)));
    }
}

template <typename T>
__global__ void swiglu_wide_kernel(T *out, int64_t ldo, const T *gate, int64_t ldg, const T *up,
                                   int64_t ldu, int64_t d) {
    cuda::allow_next();
    cuda::wait_for_input();
    const int64_t row = blockIdx.y;
    const int64_t i = (int64_t(blockIdx.x) * kThreads + threadIdx.x) * 8;
    if (i >= d) {
        return;
    }
    const uint4 g = *reinterpret_cast<const uint4 *>(gate + row * ldg + i);
    const uint4 u = *reinterpret_cast<const uint4 *>(up + row * ldu + i);
    uint4 result;
    const T *gs = reinterpret_cast<const T *>(&g);
    const T *us = reinterpret_cast<const T *>(&u);
    uint32_t *pairs = reinterpret_cast<uint32_t *>(&result);
#pragma unroll
    for (int p = 0; p < 4; ++p) {
        pairs[p] =
            cuda::pack_pair<T>(gated(cuda::to_float(gs[2 * p]), cuda::to_float(us[2 * p])),
                               gated(cuda::to_float(gs[2 * p + 1]), cuda::to_float(us[2 * p + 1])));
    }
    *reinterpret_cast<uint4 *>(out + row * ldo + i) = result;
}

bool lies_on_16_bytes(const Tensor &tensor) {
    return reinterpret_cast<uintptr_t>(tensor.data()) % 16 == 0 && tensor.stride(0) % 8 == 0;
}

template <typename T>
void run_wide(const device::Stream &stream, const Tensor &out, const Tensor &gate,
              const Tensor &up) {
    const dim3 grid(cuda::blocks_for(gate.size(1), 8 * kThreads), unsigned(gate.size(0)));
    cuda::launch(device::cuda_stream_of(stream), swiglu_wide_kernel<T>, grid, kThreads, 0, true,
                 reinterpret_cast<T *>(out.data()), out.stride(0),
                 reinterpret_cast<const T *>(gate.data()), gate.stride(0),
                 reinterpret_cast<const T *>(up.data()), up.stride(0), gate.size(1));
}

} // namespace

void swiglu_cuda(const device::Stream &stream, const Tensor &out, const Tensor &gate,
                 const Tensor &up) {
    if (gate.elements() == 0) {
        return;
    }
    const DType dtype = out.dtype();
    if (gate.dtype() == dtype && up.dtype() == dtype && gate.size(1) % 8 == 0 &&
        lies_on_16_bytes(out) && lies_on_16_bytes(gate) && lies_on_16_bytes(up)) {
        if (dtype == LLAISYS_DTYPE_BF16) {
            return run_wide<cuda::bf16>(stream, out, gate, up);
        }
        if (dtype == LLAISYS_DTYPE_F16) {
            return run_wide<cuda::f16>(stream, out, gate, up);
        }
    }
    const dim3 grid(cuda::blocks_for(gate.size(1), kThreads), unsigned(gate.size(0)));
    cuda::launch(device::cuda_stream_of(stream), swiglu_kernel, grid, kThreads, 0, true,
                 cuda::reals(out), out.stride(0), cuda::reals(gate), gate.stride(0),
                 cuda::reals(up), up.stride(0), gate.size(1));
}

} // namespace llaisys::ops
