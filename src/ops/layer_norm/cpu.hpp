#pragma once

#include "device/runtime.hpp"
#include "tensor/tensor.hpp"

namespace llaisys::ops {

void layer_norm_cpu(const device::Stream &stream, const Tensor &out, const Tensor &in,
                    const Tensor &weight, const Tensor *bias, float epsilon);

} // namespace llaisys::ops
