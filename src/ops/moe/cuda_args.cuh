// Arguments and helpers that the kernels of moe share.
#pragma once

#include "ops/cuda/common.cuh"
#include "ops/moe/op.hpp"

namespace llaisys::ops::cuda {

constexpr int kMoeMaxExperts = 512;

// The experts' MLPs and the token pairs of a launch. Pair p = t * top_k + j is choice j of token t.
template <typename T> struct MoeArgs {
    const T *x; // [n, hs]
    int64_t ldx;
    const int32_t *experts; // [n * top_k]
    const float *weights;   // [n * top_k]
    const int32_t *sorted;  // offsets [n_experts + 1], then pairs [n * top_k] by expert
    const T *gate;          // [n_experts, di, hs]
    const T *up;            // [n_experts, di, hs]
    const T *down;          // [n_experts, hs, di]
    Reals gate_bias, up_bias, down_bias; // [n_experts, di or hs]; data null: none
    T *hidden;                           // [n * top_k, di]
    T *expert_out;                       // [n * top_k, hs]
    Reals out;                           // [n, hs]
    int64_t ldo;
    bool adds;
    int n, top_k, n_experts, hs, di;
    float limit, alpha;
};

// The parts of the arguments of a kernel that describe the experts, without their weights.
template <typename Args> void set_mlp(Args *args, const ExpertMlp &mlp) {
    args->gate_bias = reals(mlp.gate_bias);
    args->up_bias = reals(mlp.up_bias);
    args->down_bias = reals(mlp.down_bias);
    args->hs = int(mlp.gate->in_features);
    args->di = int(mlp.gate->out_features);
    args->limit = mlp.limit;
    args->alpha = mlp.alpha;
}
// Weights of type T.
template <typename T> void set_weights(MoeArgs<T> *args, const ExpertMlp &mlp) {
    args->gate = reinterpret_cast<const T *>(mlp.gate->all.bytes.data());
    args->up = reinterpret_cast<const T *>(mlp.up->all.bytes.data());
    args->down = reinterpret_cast<const T *>(mlp.down->all.bytes.data());
}

// up * silu(gate), or the clamped form of gpt-oss for limit > 0.
__device__ __forceinline__ float moe_activation(float gate, float up, float limit, float alpha) {
    if (limit > 0.0f) {
        gate = fminf(gate, limit);
        up = fminf(fmaxf(up, -limit), limit) + 1.0f;
    } else {
        alpha = 1.0f;
    }
    return up * gate / (1.0f + expf(-alpha * gate));
}

// Dot product of eight adjacent 16-bit values.
template <typename T>
__device__ __forceinline__ float dot_8(const uint4 &a, const uint4 &b, float sum) {
    const T *x = reinterpret_cast<const T *>(&a);
    const T *y = reinterpret_cast<const T *>(&b);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        sum += to_float(x[i]) * to_float(y[i]);
    }
    return sum;
}

} // namespace llaisys::ops::cuda
