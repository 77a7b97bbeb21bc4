// Attention with an explicit mask. Contract: llaisysSelfAttentionMasked.
#pragma once

#include "device/runtime.hpp"
#include "tensor/tensor.hpp"

namespace llaisys::ops {

void self_attention_masked(const device::Stream &stream, const Tensor &out, const Tensor &q,
                           const Tensor &k, const Tensor &v, const Tensor &mask, float scale);
decltype(self_attention_masked) self_attention_masked_cpu, self_attention_masked_cuda;

} // namespace llaisys::ops
