// The CPU side of quantise. Arguments have been checked.
#pragma once

#include "ops/quantise/op.hpp"

namespace llaisys::ops {

void quantise_cpu(const device::Stream &stream, const Tensor &out, const Tensor &in);

} // namespace llaisys::ops
