// Embedding lookup. Contract: llaisysEmbedding.
#pragma once

#include "device/runtime.hpp"
#include "tensor/tensor.hpp"

namespace llaisys::ops {

void embedding(const device::Stream &stream, const Tensor &out, const Tensor &index,
               const Tensor &table);

} // namespace llaisys::ops
