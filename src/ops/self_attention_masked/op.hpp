// Attention with an explicit mask: attention() over lists made from the mask, which is read back
// from the device. For tests. Contract: llaisysSelfAttentionMasked.
#pragma once

#include "device/runtime.hpp"
#include "tensor/tensor.hpp"

namespace llaisys::ops {

void self_attention_masked(const device::Stream &stream, const Tensor &out, const Tensor &q,
                           const Tensor &k, const Tensor &v, const Tensor &mask, float scale);

} // namespace llaisys::ops
