// Copies between layouts. Contract: llaisysRearrange.
#pragma once

#include "device/runtime.hpp"
#include "tensor/tensor.hpp"

namespace llaisys::ops {

void rearrange(const device::Stream &stream, const Tensor &out, const Tensor &in);

// The same values without gaps: the tensor itself when it has none, otherwise a copy.
Tensor contiguous(const device::Stream &stream, const Tensor &tensor);

} // namespace llaisys::ops
