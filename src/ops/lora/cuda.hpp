// CUDA side of lora. Arguments have been checked.
#pragma once

#include "ops/lora/op.hpp"

namespace llaisys::ops {

// Values of the input that one block of the first kernel sums.
constexpr int64_t kLoraSplit = 1024;

void lora_cuda(const device::Stream &stream, const Tensor &in, const LoraPart *parts, int n_parts,
               const LoraRows &rows, const Tensor &scratch);

// parts: gate and up. False: not supported for these sizes or dtypes; nothing was queued.
bool lora_swiglu_cuda(const device::Stream &stream, const Tensor &in, const LoraPart *parts,
                      const LoraRows &rows, const Tensor &scratch);

} // namespace llaisys::ops
