// Rotary position embedding with explicit positions. Contract: llaisysRope.
#pragma once

#include "device/runtime.hpp"
#include "tensor/tensor.hpp"

namespace llaisys::ops {

void rope(const device::Stream &stream, const Tensor &out, const Tensor &in,
          const Tensor &positions, const Tensor &inv_freq);

// rope() of queries and keys, each in place. The CPU computes the angles of a token once for both.
void rope_both(const device::Stream &stream, const Tensor &q, const Tensor &k,
               const Tensor &positions, const Tensor &inv_freq);

} // namespace llaisys::ops
