// A matrix product per attention head: the up-projections of latent attention.
#pragma once

#include "ops/moe/op.hpp"

namespace llaisys::ops {

// out[t, h] = in[t, h] * weight[h]^T. out [n, heads, out_features] and in [n, heads, in_features]
// real strided; weights: one matrix [out_features, in_features] per head. A row's result depends on
// that row and its weight only.
void head_linear(const device::Stream &stream, const Tensor &out, const Tensor &in,
                 const ExpertWeights &weights);
decltype(head_linear) head_linear_cpu, head_linear_cuda;

} // namespace llaisys::ops
