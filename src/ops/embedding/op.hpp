// Embedding lookup. Contract: llaisysEmbedding.
#pragma once

#include "device/runtime.hpp"
#include "tensor/tensor.hpp"

namespace llaisys::ops {

void embedding(const device::Stream &stream, const Tensor &out, const Tensor &index,
               const Tensor &table);
decltype(embedding) embedding_cpu;
decltype(embedding) embedding_cuda; // an index outside the table gives a row of zeros

} // namespace llaisys::ops
