// CPU implementation of softmax. Arguments are checked by op.cpp.
#pragma once

#include "ops/softmax/op.hpp"

namespace llaisys::ops {

void softmax_cpu(const device::Stream &stream, const Tensor &out, const Tensor &in);

} // namespace llaisys::ops
