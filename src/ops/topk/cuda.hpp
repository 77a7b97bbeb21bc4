// CUDA side of topk. Arguments have been checked.
#pragma once

#include "ops/topk/op.hpp"

namespace llaisys::ops {

void topk_cuda(const device::Stream &stream, const Tensor &index, const Tensor &value,
               const Tensor &values);

} // namespace llaisys::ops
