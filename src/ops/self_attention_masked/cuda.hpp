// CUDA side of self_attention_masked. Arguments have been checked.
#pragma once

#include "ops/self_attention_masked/op.hpp"

namespace llaisys::ops {

void self_attention_masked_cuda(const device::Stream &stream, const Tensor &out, const Tensor &q,
                                const Tensor &k, const Tensor &v, const Tensor &mask, float scale);

} // namespace llaisys::ops
