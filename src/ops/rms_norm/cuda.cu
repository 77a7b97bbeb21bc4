// out = x / rms(x) * weight, where x is the input, or the residual after the input was added to it.
// One block a row, which is read twice (the second time from the first-level cache); bound by
// memory, and by latency for few rows.
#include "ops/rms_norm/cuda.hpp"

#include "ops/cuda/common.cuh"

namespace llaisys::ops {

namespace {

constexpr int kThreads = 256;

struct Rows {
    cuda::Reals values;
    int64_t stride;
};

__global__ void rms_norm_kernel(Rows out, Rows x, Rows added, cuda::Reals weight, int64_t d,
                                float epsilon) {
    __shared__ float scratch[kThreads / cuda::kWarp];
    cuda::wait_for_input();
    cuda::allow_next();
    const int64_t row = blockIdx.x;
    float sum = 0;
    for (int64_t i = threadIdx.x; i < d; i += kThreads) {
        float value = x.values.load(row * x.stride + i);
        if (added.values.data != nullptr) {
            x.values.store(row * x.stride + i, value + added.values.load(row * added.stride + i));
            value = x.values.load(row * x.stride + i); // as it was rounded
        }
        sum += value * value;
    }
    sum = cuda::block_sum<kThreads>(sum, scratch);
    const float factor = 1.0f / sqrtf(sum / float(d) + epsilon);
    for (int64_t i = threadIdx.x; i < d; i += kThreads) {
        out.values.store(row * out.stride + i,
                         x.values.load(row * x.stride + i) * factor * weight.load(i));
    }
}

// The hot case: f32 in, 16-bit out, f32 weights, rows that lie on 16 bytes.
template <typename T>
__global__ void rms_norm_wide_kernel(T *out, int64_t ldo, const float *x, int64_t ldx,
                                     const float *weight, int64_t d, float epsilon) {
    __shared__ float scratch[kThreads / cuda::kWarp];
    cuda::allow_next();
    cuda::wait_for_input();
    const int64_t row = blockIdx.x;
    const float4 *in = reinterpret_cast<const float4 *>(x + row * ldx);
    const float4 *scale = reinterpret_cast<const float4 *>(weight);
    float sum = 0;
    for (int64_t i = threadIdx.x; i < d / 4; i += kThreads) {
        const float4 v = in[i];
        sum += v.x * v.x + v.y * v.y + v.z * v.z + v.w * v.w;
    }
    sum = cuda::block_sum<kThreads>(sum, scratch);
    const float factor = 1.0f / sqrtf(sum / float(d) + epsilon);
    uint2 *to = reinterpret_cast<uint2 *>(out + row * ldo);
    for (int64_t i = threadIdx.x; i < d / 4; i += kThreads) {
        const float4 v = in[i];
        const float4 w = scale[i];
        to[i] = make_uint2(cuda::pack_pair<T>(v.x * factor * w.x, v.y * factor * w.y),
                           cuda::pack_pair<T>(v.z * factor * w.z, v.w * factor * w.w));
    }
}

bool lies_on_16_bytes(const Tensor &tensor) {
    return reinterpret_cast<uintptr_t>(tensor.data()) % 16 == 0 &&
           (tensor.ndim() < 2 || tensor.stride(0) % 8 == 0);
}

template <typename T>
void run_wide(const device::Stream &stream, const Tensor &out, const Tensor &in,
              const Tensor &weight, float epsilon) {
    cuda::launch(device::cuda_stream_of(stream), rms_norm_wide_kernel<T>, unsigned(in.size(0)),
                 kThreads, 0, true, reinterpret_cast<T *>(out.data()), out.stride(0),
                 in.as<float>(), in.stride(0), weight.as<float>(), in.size(1), epsilon);
}

} // namespace

void rms_norm_cuda(const device::Stream &stream, const Tensor &out, const Tensor &in,
                   const Tensor &weight, float epsilon) {
    if (in.size(0) == 0) {
        return;
    }
    const bool is_wide = in.dtype() == LLAISYS_DTYPE_F32 && weight.dtype() == LLAISYS_DTYPE_F32 &&
                         in.size(1) % 4 == 0 && lies_on_16_bytes(in) && lies_on_16_bytes(out) &&
                         lies_on_16_bytes(weight);
    if (is_wide && out.dtype() == LLAISYS_DTYPE_BF16) {
        return run_wide<cuda::bf16>(stream, out, in, weight, epsilon);
    }
    if (is_wide && out.dtype() == LLAISYS_DTYPE_F16) {
        return run_wide<cuda::f16>(stream, out, in, weight, epsilon);
    }
    cuda::launch(device::cuda_stream_of(stream), rms_norm_kernel, unsigned(in.size(0)), kThreads, 0,
                 true, Rows{cuda::reals(out), out.stride(0)}, Rows{cuda::reals(in), in.stride(0)},
                 Rows{cuda::reals(nullptr), 0}, cuda::reals(weight), in.size(1), epsilon);
}

void add_rms_norm_cuda(const device::Stream &stream, const Tensor &out, const Tensor &residual,
                       const Tensor &in, const Tensor &weight, float epsilon) {
    if (in.size(0) == 0) {
        return;
    }
    cuda::launch(device::cuda_stream_of(stream), rms_norm_kernel, unsigned(in.size(0)), kThreads, 0,
                 true, Rows{cuda::reals(out), out.stride(0)},
                 Rows{cuda::reals(residual), residual.stride(0)},
                 Rows{cuda::reals(in), in.stride(0)}, cuda::reals(weight), in.size(1), epsilon);
}

} // namespace llaisys::ops
