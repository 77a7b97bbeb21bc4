// CPU implementation of swiglu. Arguments are checked by op.cpp.
#pragma once

#include "ops/swiglu/op.hpp"

namespace llaisys::ops {

void swiglu_cpu(const device::Stream &stream, const Tensor &out, const Tensor &gate,
                const Tensor &up);

} // namespace llaisys::ops
