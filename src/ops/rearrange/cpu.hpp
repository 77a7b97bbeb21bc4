// CPU implementation of rearrange. Arguments are checked by op.cpp.
#pragma once

#include "ops/rearrange/op.hpp"

namespace llaisys::ops {

void rearrange_cpu(const device::Stream &stream, const Tensor &out, const Tensor &in);

} // namespace llaisys::ops
