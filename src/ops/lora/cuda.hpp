// CUDA side of lora. Arguments have been checked.
#pragma once

#include "ops/lora/op.hpp"

namespace llaisys::ops {

void lora_cuda(const device::Stream &stream, const Tensor &in, const LoraPart *parts, int n_parts,
               const LoraRows &rows, const Tensor &scratch);

} // namespace llaisys::ops
