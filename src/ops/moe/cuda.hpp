// CUDA implementation of moe. Arguments are checked by op.cpp.
#pragma once

#include "ops/moe/op.hpp"

namespace llaisys::ops {

void moe_route_cuda(const device::Stream &stream, const Tensor &experts, const Tensor &weights,
                    const Tensor &logits, const Tensor *bias, const MoeRouting &routing);
bool moe_norm_route_cuda(const device::Stream &stream, const Tensor &experts, const Tensor &weights,
                         const RouterInput &input, const Tensor *bias, const MoeRouting &routing);
bool moe_token_cuda(const device::Stream &stream, const RouterInput &input, const Tensor *bias,
                    const MoeRouting &routing, const ExpertMlp &mlp, int64_t k);
void moe_mlp_cuda(const device::Stream &stream, const Tensor &out, bool adds, const Tensor &in,
                  const Tensor &experts, const Tensor &weights, const ExpertMlp &mlp,
                  const MoeBuffers &buffers);
void sigmoid_scale_cuda(const device::Stream &stream, const Tensor &rows, const Tensor &logits);

} // namespace llaisys::ops
