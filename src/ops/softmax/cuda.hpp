// CUDA side of softmax. Arguments have been checked.
#pragma once

#include "ops/softmax/op.hpp"

namespace llaisys::ops {

void softmax_cuda(const device::Stream &stream, const Tensor &out, const Tensor &in);

} // namespace llaisys::ops
