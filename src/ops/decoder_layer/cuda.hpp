// Fused steps of a decoder layer on CUDA. Each returns true when it has queued its kernels, false
// when size or dtype is not supported and the caller must compose the plain operators.
#pragma once

#include "ops/decoder_layer/op.hpp"

namespace llaisys::ops {

bool attention_input_cuda(const device::Stream &stream, Residual *residual, const Norm &norm,
                          const LinearPart &q, const LinearPart &k, const LinearPart &v,
                          const HeadNorms &head_norms, const Placement &placement,
                          const Lora &adapters);

bool mlp_input_cuda(const device::Stream &stream, Residual *residual, const Norm &norm,
                    const LinearPart &gate, const LinearPart &up, const Lora &adapters);

bool head_cuda(const device::Stream &stream, const Tensor &logits, const Tensor &residual,
               const Norm &norm, const LinearWeight &weight, const Tensor &rows);

} // namespace llaisys::ops
