// CUDA side of embedding. Arguments have been checked.
#pragma once

#include "ops/embedding/op.hpp"

namespace llaisys::ops {

// An index outside the table gives a row of zeros.
void embedding_cuda(const device::Stream &stream, const Tensor &out, const Tensor &index,
                    const Tensor &table);

} // namespace llaisys::ops
