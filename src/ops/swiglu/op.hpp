// SwiGLU activation of the MLP. Contract: llaisysSwiGLU.
#pragma once

#include "device/runtime.hpp"
#include "tensor/tensor.hpp"

namespace llaisys::ops {

void swiglu(const device::Stream &stream, const Tensor &out, const Tensor &gate, const Tensor &up);
decltype(swiglu) swiglu_cpu, swiglu_cuda;

} // namespace llaisys::ops
