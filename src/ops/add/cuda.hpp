// CUDA side of add. Arguments have been checked.
#pragma once

#include "ops/add/op.hpp"

namespace llaisys::ops {

void add_cuda(const device::Stream &stream, const Tensor &out, const Tensor &a, const Tensor &b);

} // namespace llaisys::ops
