// RMS norm: out = x / rms(x) * weight, where x is the input, or residual += input. Fast path in
// ops/cuda/rms_norm_rows.cuh; here one block per row, which is read twice.
//
// Layer norm: out = (x - mean) / sqrt(variance + epsilon) * weight + bias. One block per row, which
// is read three times (from L2 after the first). Memory-bound.
#include "ops/norm/op.hpp"

#include "ops/cuda/dispatch.cuh"
#include "ops/cuda/rms_norm_rows.cuh"

namespace llaisys::ops {

namespace {

using cuda::has_aligned_rows;

constexpr int kThreads = 256;

struct Rows {
    cuda::Reals values;
    int64_t stride;

    explicit Rows(const Tensor *rows)
        : values(cuda::reals(rows)), stride(rows != nullptr ? rows->stride(0) : 0) {}
};

__global__ void rms_norm_kernel(Rows out, Rows x, Rows added, cuda::Reals weight, int64_t d,
                                float epsilon) {
    __shared__ float scratch[kThreads / cuda::kWarpSize];
    cuda::grid_dependency_wait();
    cuda::launch_dependents();
    const int64_t row = blockIdx.x;
    const int64_t from = row * x.stride;
    float sum = 0;
    for (int64_t i = threadIdx.x; i < d; i += kThreads) {
        float value = x.values.load(from + i);
        if (added.values.data != nullptr) {
            x.values.store(from + i, value + added.values.load(row * added.stride + i));
            value = x.values.load(from + i); // with its rounding
        }
        sum += value * value;
    }
    sum = cuda::block_sum<kThreads>(sum, scratch);
    const float factor = 1.0f / sqrtf(sum / float(d) + epsilon);
    for (int64_t i = threadIdx.x; i < d; i += kThreads) {
        out.values.store(row * out.stride + i, x.values.load(from + i) * factor * weight.load(i));
    }
}

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

// added: null: none; otherwise added to x first.
void run(const device::Stream &stream, const Tensor &out, const Tensor &x, const Tensor *added,
         const Tensor &weight, float epsilon) {
    cuda::launch(device::cuda_stream_of(stream), rms_norm_kernel, unsigned(x.size(0)), kThreads, 0,
                 true, Rows(&out), Rows(&x), Rows(added), cuda::reals(weight), x.size(1), epsilon);
}

// Whether rms_norm_rows.cuh supports these.
bool is_wide(const Tensor &out, const Tensor &in, const Tensor &weight) {
    const bool is_half = out.dtype() == LLAISYS_DTYPE_BF16 || out.dtype() == LLAISYS_DTYPE_F16;
    return is_half && in.dtype() == LLAISYS_DTYPE_F32 && weight.dtype() == LLAISYS_DTYPE_F32 &&
           in.size(1) % 4 == 0 && has_aligned_rows(in) && has_aligned_rows(out) &&
           has_aligned_rows(weight);
}

} // namespace

void rms_norm_cuda(const device::Stream &stream, const Tensor &out, const Tensor &in,
                   const Tensor &weight, float epsilon) {
    if (in.size(0) == 0) {
        return;
    }
    if (is_wide(out, in, weight)) {
        return cuda::dispatch_half(out.dtype(), [&](auto type) {
            using T = decltype(type);
            cuda::rms_norm_rows<T>(device::cuda_stream_of(stream),
                                   reinterpret_cast<T *>(out.data()), out.stride(0), in.as<float>(),
                                   in.stride(0), nullptr, weight.as<float>(), in.size(0),
                                   in.size(1), epsilon);
        });
    }
    run(stream, out, in, nullptr, weight, epsilon);
}

void add_rms_norm_cuda(const device::Stream &stream, const Tensor &out, const Tensor &residual,
                       const Tensor &in, const Tensor &weight, float epsilon) {
    if (in.size(0) > 0) {
        run(stream, out, residual, &in, weight, epsilon);
    }
}

void layer_norm_cuda(const device::Stream &stream, const Tensor &out, const Tensor &in,
                     const Tensor &weight, const Tensor *bias, float epsilon) {
    if (in.size(0) == 0) {
        return;
    }
    cuda::launch(device::cuda_stream_of(stream), layer_norm_kernel, unsigned(in.size(0)), kThreads,
                 0, true, Rows(&out), Rows(&in), cuda::reals(weight), cuda::reals(bias), in.size(1),
                 epsilon);
}

} // namespace llaisys::ops
