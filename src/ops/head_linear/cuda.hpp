// CUDA implementation of head_linear. Arguments are checked by op.cpp.
#pragma once

#include "ops/head_linear/op.hpp"

namespace llaisys::ops {

void head_linear_cuda(const device::Stream &stream, const Tensor &out, const Tensor &in,
                      const ExpertWeights &weights);

} // namespace llaisys::ops
