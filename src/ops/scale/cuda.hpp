#pragma once

#include "device/runtime.hpp"
#include "tensor/tensor.hpp"

namespace llaisys::ops {

void scale_cuda(const device::Stream &stream, const Tensor &out, const Tensor &in, float factor,
                float soft_cap);

} // namespace llaisys::ops
