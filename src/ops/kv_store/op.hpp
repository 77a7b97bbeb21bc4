// Writes keys or values into their slots. Contract: llaisysKvStore.
#pragma once

#include "device/runtime.hpp"
#include "tensor/tensor.hpp"

namespace llaisys::ops {

void kv_store(const device::Stream &stream, const Tensor &cache, const Tensor &values,
              const Tensor &slots);

} // namespace llaisys::ops
