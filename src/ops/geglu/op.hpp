// GELU activation of the MLP, gated or alone. Contract: llaisysGeGLU.
#pragma once

#include "device/runtime.hpp"
#include "tensor/tensor.hpp"

namespace llaisys::ops {

// up null: no gate, out = gelu(gate).
void geglu(const device::Stream &stream, const Tensor &out, const Tensor &gate, const Tensor *up,
           bool is_erf = false);
decltype(geglu) geglu_cpu, geglu_cuda;

} // namespace llaisys::ops
