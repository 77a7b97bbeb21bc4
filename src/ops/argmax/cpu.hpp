// CPU implementation of argmax. Arguments are checked by op.cpp.
#pragma once

#include "ops/argmax/op.hpp"

namespace llaisys::ops {

void argmax_cpu(const device::Stream &stream, const Tensor &max_index, const Tensor &max_value,
                const Tensor &values, const ArgmaxOnHost &host);

} // namespace llaisys::ops
