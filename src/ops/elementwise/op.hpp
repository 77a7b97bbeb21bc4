// Elementwise sum. The contract is the one of llaisysAdd in include/llaisys/ops.h.
#pragma once

#include "device/runtime.hpp"
#include "tensor/tensor.hpp"

namespace llaisys::ops {

void add(const device::Stream &stream, const Tensor &out, const Tensor &a, const Tensor &b);
decltype(add) add_cpu, add_cuda;

} // namespace llaisys::ops
