// The CUDA side of fill_drawn. Arguments have been checked.
#pragma once

#include "ops/fill_drawn/op.hpp"

namespace llaisys::ops {

void fill_drawn_cuda(const device::Stream &stream, const Tensor &out, const Tensor &drawn,
                     const Tensor &source);

} // namespace llaisys::ops
