// CPU implementation of self_attention_masked. Arguments are checked by op.cpp.
#pragma once

#include "ops/self_attention_masked/op.hpp"

namespace llaisys::ops {

void self_attention_masked_cpu(const device::Stream &stream, const Tensor &out, const Tensor &q,
                               const Tensor &k, const Tensor &v, const Tensor &mask, float scale);

} // namespace llaisys::ops
