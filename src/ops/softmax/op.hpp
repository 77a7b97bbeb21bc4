// Softmax over the last dimension. Contract: llaisysSoftmax.
#pragma once

#include "device/runtime.hpp"
#include "tensor/tensor.hpp"

namespace llaisys::ops {

void softmax(const device::Stream &stream, const Tensor &out, const Tensor &in);
decltype(softmax) softmax_cpu, softmax_cuda;

} // namespace llaisys::ops
