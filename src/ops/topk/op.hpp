// The k largest of each row. Contract: llaisysTopK.
#pragma once

#include "device/runtime.hpp"
#include "tensor/tensor.hpp"

namespace llaisys::ops {

void topk(const device::Stream &stream, const Tensor &index, const Tensor &value,
          const Tensor &values);
decltype(topk) topk_cpu, topk_cuda;

} // namespace llaisys::ops
