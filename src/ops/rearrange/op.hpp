// Copies between layouts. Contract: llaisysRearrange.
#pragma once

#include "device/runtime.hpp"
#include "tensor/tensor.hpp"

namespace llaisys::ops {

void rearrange(const device::Stream &stream, const Tensor &out, const Tensor &in);

} // namespace llaisys::ops
