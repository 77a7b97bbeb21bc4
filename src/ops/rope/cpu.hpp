// CPU implementation of rope. Arguments are checked by op.cpp.
#pragma once

#include "ops/rope/op.hpp"

namespace llaisys::ops {

struct Rotation {
    const Tensor &out;
    const Tensor &in;
};

// All tensors have the same tokens and d.
void rope_cpu(const device::Stream &stream, const Rotation *rotations, int count,
              const Tensor &positions, const Tensor &inv_freq, float factor);

} // namespace llaisys::ops
