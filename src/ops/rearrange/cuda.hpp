// CUDA side of rearrange. Arguments have been checked.
#pragma once

#include "ops/rearrange/op.hpp"

namespace llaisys::ops {

void rearrange_cuda(const device::Stream &stream, const Tensor &out, const Tensor &in);

} // namespace llaisys::ops
