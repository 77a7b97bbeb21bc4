// Layer norm with an optional bias. Contract: llaisysLayerNorm.
#pragma once

#include "device/runtime.hpp"
#include "tensor/tensor.hpp"

namespace llaisys::ops {

// bias null: none.
void layer_norm(const device::Stream &stream, const Tensor &out, const Tensor &in,
                const Tensor &weight, const Tensor *bias, float epsilon);
decltype(layer_norm) layer_norm_cpu, layer_norm_cuda;

} // namespace llaisys::ops
