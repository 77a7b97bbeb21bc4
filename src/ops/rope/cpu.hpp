// The CPU side of rope. Arguments have been checked.
#pragma once

#include "ops/rope/op.hpp"

namespace llaisys::ops {

struct Rotation {
    const Tensor &out;
    const Tensor &in;
};

// All of them have the same tokens and d.
void rope_cpu(const device::Stream &stream, const Rotation *rotations, int count,
              const Tensor &positions, const Tensor &inv_freq);

} // namespace llaisys::ops
