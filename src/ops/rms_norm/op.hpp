// RMS norm, alone or fused with the residual sum before it. Contract: llaisysRmsNorm,
// llaisysAddRmsNorm.
#pragma once

#include "device/runtime.hpp"
#include "tensor/tensor.hpp"

namespace llaisys::ops {

void rms_norm(const device::Stream &stream, const Tensor &out, const Tensor &in,
              const Tensor &weight, float epsilon);

void add_rms_norm(const device::Stream &stream, const Tensor &out, const Tensor &residual,
                  const Tensor &in, const Tensor &weight, float epsilon);

} // namespace llaisys::ops
