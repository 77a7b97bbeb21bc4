// CPU implementation of topk. Arguments are checked by op.cpp.
#pragma once

#include "ops/topk/op.hpp"

namespace llaisys::ops {

void topk_cpu(const device::Stream &stream, const Tensor &index, const Tensor &value,
              const Tensor &values);

} // namespace llaisys::ops
