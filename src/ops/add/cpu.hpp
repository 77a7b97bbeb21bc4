// CPU implementation of add. Arguments are checked by op.cpp.
#pragma once

#include "ops/add/op.hpp"

namespace llaisys::ops {

void add_cpu(const device::Stream &stream, const Tensor &out, const Tensor &a, const Tensor &b);

} // namespace llaisys::ops
