#pragma once

#include "device/runtime.hpp"
#include "tensor/tensor.hpp"

namespace llaisys::ops {

void geglu_cpu(const device::Stream &stream, const Tensor &out, const Tensor &gate,
               const Tensor *up, bool is_erf);

} // namespace llaisys::ops
