// CUDA side of sample_rows. Arguments have been checked.
#pragma once

#include "ops/sample_rows/op.hpp"

namespace llaisys::ops {

void adjust_rows_cuda(const device::Stream &stream, const Tensor &out, const Tensor &logits,
                      const RowAdjustments &adjustments);
void weigh_rows_cuda(const device::Stream &stream, const Tensor &sums, const Tensor &picks,
                     const Tensor &logits, const Tensor &best, const Tensor &rows,
                     const Tensor &temperatures, const Tensor &uniforms);
void sample_rows_cuda(const device::Stream &stream, const Tensor &ids, const Tensor &is_open,
                      const Tensor &logits, const Tensor &best_ids, const Tensor &best,
                      const Tensor &sums, const Tensor &picks, const RowSampling &samples);
void rank_rows_cuda(const device::Stream &stream, const RowRanks &out, const Tensor &ids,
                    const Tensor &logits, const Tensor &rows, const Tensor &best_ids,
                    const Tensor &best);

} // namespace llaisys::ops
