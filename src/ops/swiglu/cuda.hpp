// CUDA side of swiglu. Arguments have been checked.
#pragma once

#include "ops/swiglu/op.hpp"

namespace llaisys::ops {

void swiglu_cuda(const device::Stream &stream, const Tensor &out, const Tensor &gate,
                 const Tensor &up);

} // namespace llaisys::ops
