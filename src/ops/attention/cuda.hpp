// CUDA side of attention. Everything but the content of the block tables has been checked; slots
// outside the cache are not detected.
#pragma once

#include "ops/attention/op.hpp"

namespace llaisys::ops {

void attention_cuda(const device::Stream &stream, const Tensor &out, const Tensor &q,
                    const KvLayer &kv, const AttentionLists &lists, float scale, float soft_cap,
                    const Tensor *sinks);

} // namespace llaisys::ops
