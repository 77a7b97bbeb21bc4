// CPU implementation of embedding. Arguments are checked by op.cpp.
#pragma once

#include "ops/embedding/op.hpp"

namespace llaisys::ops {

void embedding_cpu(const device::Stream &stream, const Tensor &out, const Tensor &index,
                   const Tensor &table);

} // namespace llaisys::ops
