// CPU implementation of rms_norm. Arguments are checked by op.cpp.
#pragma once

#include "ops/rms_norm/op.hpp"

namespace llaisys::ops {

void rms_norm_cpu(const device::Stream &stream, const Tensor &out, const Tensor &in,
                  const Tensor &weight, float epsilon);

void add_rms_norm_cpu(const device::Stream &stream, const Tensor &out, const Tensor &residual,
                      const Tensor &in, const Tensor &weight, float epsilon);

} // namespace llaisys::ops
