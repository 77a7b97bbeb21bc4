// Layer norm with an optional bias. Contract: llaisysLayerNorm.
#pragma once

#include "device/runtime.hpp"
#include "tensor/tensor.hpp"

namespace llaisys::ops {

// bias null: none.
void layer_norm(const device::Stream &stream, const Tensor &out, const Tensor &in,
                const Tensor &weight, const Tensor *bias, float epsilon);

} // namespace llaisys::ops
