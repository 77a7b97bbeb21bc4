// Sum of two tensors, and multiplication by a constant with an optional soft cap. Contract:
// llaisysAdd.
#pragma once

#include "device/runtime.hpp"
#include "tensor/tensor.hpp"

namespace llaisys::ops {

void add(const device::Stream &stream, const Tensor &out, const Tensor &a, const Tensor &b);
decltype(add) add_cpu, add_cuda;

// out = in * factor; with a soft_cap above 0 soft_cap * tanh(in * factor / soft_cap). in, out [n, d]
// real strided. out may be in.
void scale(const device::Stream &stream, const Tensor &out, const Tensor &in, float factor,
           float soft_cap = 0.0f);
decltype(scale) scale_cpu, scale_cuda;

} // namespace llaisys::ops
