// Quantise weights to blocks. Contract: llaisysQuantise.
#pragma once

#include "device/runtime.hpp"
#include "tensor/tensor.hpp"

namespace llaisys::ops {

void quantise(const device::Stream &stream, const Tensor &out, const Tensor &in);
decltype(quantise) quantise_cpu;

} // namespace llaisys::ops
