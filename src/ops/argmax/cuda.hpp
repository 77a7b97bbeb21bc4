// CUDA side of argmax. Arguments have been checked.
#pragma once

#include "ops/argmax/op.hpp"

namespace llaisys::ops {

void argmax_cuda(const device::Stream &stream, const Tensor &max_index, const Tensor &max_value,
                 const Tensor &values, const ArgmaxOnHost &host);

} // namespace llaisys::ops
