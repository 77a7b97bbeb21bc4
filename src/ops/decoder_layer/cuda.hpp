// The CUDA side of the decoder layer's steps: true when they were queued as fused kernels, false
// when this size or dtype has none and the plain operators must do.
#pragma once

#include "ops/decoder_layer/op.hpp"

namespace llaisys::ops {

bool attention_input_cuda(const device::Stream &stream, const Tensor &residual, const Norm &norm,
                          const LinearPart &q, const LinearPart &k, const LinearPart &v,
                          const Placement &placement);

bool mlp_input_cuda(const device::Stream &stream, const Tensor &residual, const Norm &norm,
                    const LinearPart &gate, const LinearPart &up);

bool head_cuda(const device::Stream &stream, const Tensor &logits, const Tensor &residual,
               const Norm &norm, const LinearWeight &weight, const Tensor &rows);

} // namespace llaisys::ops
