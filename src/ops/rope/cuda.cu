// Rotary position embedding (RoPE) of pairs (i, i + d / 2). One block per token. Memory-bound.
#include "ops/rope/op.hpp"

#include "ops/cuda/common.cuh"

namespace llaisys::ops {

namespace {

constexpr int kThreads = 256;

struct Heads {
    cuda::Reals values;
    int64_t stride_token;
    int64_t stride_head;
};

__global__ void rope_kernel(Heads out, Heads in, const int64_t *positions, const float *inv_freq,
                            int64_t heads, int64_t half, float factor) {
    cuda::grid_dependency_wait();
    const int64_t token = blockIdx.x;
    for (int64_t i = threadIdx.x; i < heads * half; i += kThreads) {
        const int64_t pair = i % half;
        const int64_t head = i / half;
        float sin = 0;
        float cos = 0;
        cuda::rope_sincos(positions[token], inv_freq[pair], &sin, &cos);
        const float times = inv_freq[pair] != 0 ? factor : 1.0f;
        sin *= times;
        cos *= times;
        const int64_t from = token * in.stride_token + head * in.stride_head + pair;
        const int64_t to = token * out.stride_token + head * out.stride_head + pair;
        const float low = in.values.load(from);
        const float high = in.values.load(from + half);
        out.values.store(to, low * cos - high * sin);
        out.values.store(to + half, high * cos + low * sin);
    }
}

} // namespace

void rope_cuda(const device::Stream &stream, const Tensor &out, const Tensor &in,
               const Tensor &positions, const Tensor &inv_freq, float factor) {
    if (in.elements() == 0) {
        return;
    }
    cuda::launch(device::cuda_stream_of(stream), rope_kernel, unsigned(in.size(0)), kThreads, 0,
                 true, Heads{cuda::reals(out), out.stride(0), out.stride(1)},
                 Heads{cuda::reals(in), in.stride(0), in.stride(1)}, positions.as<int64_t>(),
                 inv_freq.as<float>(), in.size(1), in.size(2) / 2, factor);
}

} // namespace llaisys::ops
