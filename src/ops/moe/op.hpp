// Mixture of experts: routing of tokens to experts, and the SwiGLU MLPs of the selected experts.
// Contract: llaisysMoeRoute and llaisysMoeMlp in include/llaisys/ops.h.
#pragma once

#include "ops/linear/op.hpp"

#include <vector>

namespace llaisys::ops {

// How the scores of the experts become a selection and weights.
struct MoeRouting {
    bool is_sigmoid = false;     // scores: sigmoid of each logit; otherwise softmax of the row
    bool is_renormalised = true; // the weights of a token are divided by their sum
    int n_groups = 1;            // equal groups of adjacent experts
    int n_top_groups = 1;        // groups from which a token selects its experts
    float scale = 1.0f;          // of the weights
};

// experts i32 [n, k], weights f32 [n, k]: the selected experts of each row of logits (f32 [n, E]),
// best first, lowest index first on a tie. bias f32 [E] is added to the scores for the selection,
// not to the weights; null: none. A group's score is its best expert, or the sum of its two best
// with a bias. NaN counts as the lowest score.
void moe_route(const device::Stream &stream, const Tensor &experts, const Tensor &weights,
               const Tensor &logits, const Tensor *bias, const MoeRouting &routing);
decltype(moe_route) moe_route_cpu, moe_route_cuda;

// The input of a router: rows of the residual stream, their RMS norm and the product.
struct RouterInput {
    const Tensor &residual;    // f32 [n, hs]
    const Tensor &norm_weight; // [hs]
    float epsilon;
    const Tensor &normed;       // [n, hs], written
    const LinearWeight *router; // [E, hs]
    const Tensor *router_bias;  // [E] real; null: none
    bool needs_normed = true;   // false: moe_token does not write it
};

// moe_route after the norm and the product with the router, in one kernel. False where the device has
// none for these arguments; nothing is written then.
bool moe_norm_route(const device::Stream &stream, const Tensor &experts, const Tensor &weights,
                    const RouterInput &input, const Tensor *bias, const MoeRouting &routing);
decltype(moe_norm_route) moe_norm_route_cuda;

// Weights of one product of all experts, packed for the device.
struct ExpertWeights {
    int64_t count = 0; // experts; 0: not defined()
    int64_t out_features = 0;
    int64_t in_features = 0;
    LinearWeight all;               // a device that stores weights by rows: [count * out, in]
    std::vector<LinearWeight> each; // otherwise: one per expert

    // weight: [count * out_features, in_features], expert by expert.
    static ExpertWeights pack(const device::Stream &stream, const Tensor &weight, int64_t count);
    bool defined() const { return count > 0; }
};

// The MLPs of all experts. Biases are real [E, out_features]; null: none.
struct ExpertMlp {
    const ExpertWeights *gate; // [E, di, hs]
    const ExpertWeights *up;   // [E, di, hs]
    const ExpertWeights *down; // [E, hs, di]
    const Tensor *gate_bias = nullptr;
    const Tensor *up_bias = nullptr;
    const Tensor *down_bias = nullptr;
    // 0: up * silu(gate). Otherwise that of gpt-oss: gate and up are clamped to it, then
    // (up + 1) * gate * sigmoid(alpha * gate).
    float limit = 0.0f;
    float alpha = 1.0f;
};

// Scratch for n tokens with k experts each.
struct MoeBuffers {
    Tensor gate;   // [n * k, di], activations
    Tensor up;     // [n * k, di]; not on CUDA
    Tensor out;    // [n * k, hs]
    Tensor sorted; // i32 [moe_sorted_size()]; not on the CPU
};
int64_t moe_sorted_size(int64_t n_pairs, int64_t n_experts);

// out[t] = sum over j of weights[t, j] * MLP of expert experts[t, j] of in[t], summed in the order
// of j; added to out (f32) with `adds`. in [n, hs]. Only selected experts are read.
void moe_mlp(const device::Stream &stream, const Tensor &out, bool adds, const Tensor &in,
             const Tensor &experts, const Tensor &weights, const ExpertMlp &mlp,
             const MoeBuffers &buffers);
decltype(moe_mlp) moe_mlp_cpu, moe_mlp_cuda;

// input.residual (f32, one row) += the weighted MLPs of k experts, with the norm, the router and
// the routing in one kernel. False where the device has none for these arguments; nothing is
// written then.
bool moe_token(const device::Stream &stream, const RouterInput &input, const Tensor *bias,
               const MoeRouting &routing, const ExpertMlp &mlp, int64_t k);
decltype(moe_token) moe_token_cuda;

// rows[t] *= sigmoid(logits[t]); rows [n, d] real strided, logits f32 [n, 1].
void sigmoid_scale(const device::Stream &stream, const Tensor &rows, const Tensor &logits);
decltype(sigmoid_scale) sigmoid_scale_cpu, sigmoid_scale_cuda;

} // namespace llaisys::ops
