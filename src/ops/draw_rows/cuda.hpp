// The CUDA side of draw_rows. Arguments have been checked.
#pragma once

#include "ops/draw_rows/op.hpp"

namespace llaisys::ops {

void adjust_rows_cuda(const device::Stream &stream, const Tensor &out, const Tensor &logits,
                      const RowAdjustments &adjustments);
void weigh_rows_cuda(const device::Stream &stream, const Tensor &sums, const Tensor &picks,
                     const Tensor &logits, const Tensor &best, const Tensor &rows,
                     const Tensor &temperatures, const Tensor &uniforms);

} // namespace llaisys::ops
