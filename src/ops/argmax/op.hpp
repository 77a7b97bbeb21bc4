// The largest value of each row. Contract: llaisysArgmax.
#pragma once

#include "device/runtime.hpp"
#include "tensor/tensor.hpp"

namespace llaisys::ops {

void argmax(const device::Stream &stream, const Tensor &max_index, const Tensor &max_value,
            const Tensor &values);

} // namespace llaisys::ops
