// Activation of the MLP, gated or alone. Contract: llaisysSwiGLU.
#pragma once

#include "device/runtime.hpp"
#include "tensor/tensor.hpp"

namespace llaisys::ops {

enum class Activation { silu, gelu_tanh, gelu_erf };

// out = activation(gate) * up. up null: no gate, out = activation(gate); not with silu. gelu is
// x * Phi(x) with erf, or its tanh approximation. All [n, d] real strided; out may be gate or up.
void glu(const device::Stream &stream, const Tensor &out, const Tensor &gate, const Tensor *up,
         Activation activation);
decltype(glu) glu_cpu, glu_cuda;

inline void swiglu(const device::Stream &stream, const Tensor &out, const Tensor &gate,
                   const Tensor &up) {
    glu(stream, out, gate, &up, Activation::silu);
}

} // namespace llaisys::ops
