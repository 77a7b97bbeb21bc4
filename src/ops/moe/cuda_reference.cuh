// Mixture of experts for weights and activations of any real dtype and size; for tests.
#pragma once

#include "ops/moe/cuda_args.cuh"

namespace llaisys::ops::cuda {

constexpr int kMoeReferenceThreads = 256;

// Weights, activations and scratch of any real dtypes.
struct MoeReference {
    Reals x, gate, up, down, hidden, out;
    Reals gate_bias, up_bias, down_bias;
    const int32_t *experts;
    const float *weights;
    int64_t ldx, ldo;
    int n, top_k, hs, di;
    bool adds;
    float limit, alpha;
};

__device__ float warp_dot(const Reals &a, int64_t a_at, const Reals &b, int64_t b_at, int n) {
    float sum = 0;
    for (int i = threadIdx.x % kWarpSize; i < n; i += kWarpSize) {
        sum += a.load(a_at + i) * b.load(b_at + i);
    }
    return warp_sum(sum);
}

// One warp per output of a pair.
__global__ void reference_hidden_kernel(MoeReference args) {
    const int64_t item = (int64_t(blockIdx.x) * blockDim.x + threadIdx.x) / kWarpSize;
    if (item >= int64_t(args.n) * args.top_k * args.di) {
        return;
    }
    const int64_t pair = item / args.di;
    const int64_t row = int64_t(args.experts[pair]) * args.di + item % args.di;
    const int64_t x = pair / args.top_k * args.ldx;
    float gate = warp_dot(args.gate, row * args.hs, args.x, x, args.hs);
    float up = warp_dot(args.up, row * args.hs, args.x, x, args.hs);
    gate += args.gate_bias.data != nullptr ? args.gate_bias.load(row) : 0.0f;
    up += args.up_bias.data != nullptr ? args.up_bias.load(row) : 0.0f;
    if (threadIdx.x % kWarpSize == 0) {
        args.hidden.store(item, moe_activation(gate, up, args.limit, args.alpha));
    }
}

// One warp per output of a token.
__global__ void reference_out_kernel(MoeReference args) {
    const int64_t item = (int64_t(blockIdx.x) * blockDim.x + threadIdx.x) / kWarpSize;
    if (item >= int64_t(args.n) * args.hs) {
        return;
    }
    const int64_t token = item / args.hs;
    const int output = int(item % args.hs);
    float sum = 0;
    for (int j = 0; j < args.top_k; ++j) {
        const int64_t pair = token * args.top_k + j;
        const int64_t row = int64_t(args.experts[pair]) * args.hs + output;
        float value = warp_dot(args.down, row * args.di, args.hidden, pair * args.di, args.di);
        value += args.down_bias.data != nullptr ? args.down_bias.load(row) : 0.0f;
        sum += args.weights[pair] * value;
    }
    if (threadIdx.x % kWarpSize == 0) {
        const int64_t at = token * args.ldo + output;
        args.out.store(at, args.adds ? args.out.load(at) + sum : sum);
    }
}

inline void run_moe_reference(const device::CudaStream &stream, const MoeReference &args) {
    constexpr int kWarps = kMoeReferenceThreads / kWarpSize;
    const int64_t hidden = int64_t(args.n) * args.top_k * args.di;
    const int64_t outputs = int64_t(args.n) * args.hs;
    launch(stream, reference_hidden_kernel, ceil_div(hidden, kWarps), kMoeReferenceThreads, 0,
           false, args);
    launch(stream, reference_out_kernel, ceil_div(outputs, kWarps), kMoeReferenceThreads, 0, false,
           args);
}

} // namespace llaisys::ops::cuda
