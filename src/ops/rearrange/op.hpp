// Copy between layouts. Contract: llaisysRearrange.
#pragma once

#include "device/runtime.hpp"
#include "tensor/tensor.hpp"

namespace llaisys::ops {

void rearrange(const device::Stream &stream, const Tensor &out, const Tensor &in);
decltype(rearrange) rearrange_cpu, rearrange_cuda;

// The same values, contiguous: the tensor itself if it is, otherwise a copy.
Tensor contiguous(const device::Stream &stream, const Tensor &tensor);

} // namespace llaisys::ops
