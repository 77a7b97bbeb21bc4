// CUDA side of rope. Arguments have been checked.
#pragma once

#include "ops/rope/op.hpp"

namespace llaisys::ops {

void rope_cuda(const device::Stream &stream, const Tensor &out, const Tensor &in,
               const Tensor &positions, const Tensor &inv_freq, float factor);

} // namespace llaisys::ops
