// CPU implementation of quantise. Arguments are checked by op.cpp.
#pragma once

#include "ops/quantise/op.hpp"

namespace llaisys::ops {

void quantise_cpu(const device::Stream &stream, const Tensor &out, const Tensor &in);

} // namespace llaisys::ops
