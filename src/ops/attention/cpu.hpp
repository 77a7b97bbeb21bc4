// CPU implementation of attention. Everything except the contents of the lists is checked by
// op.cpp.
#pragma once

#include "ops/attention/op.hpp"

namespace llaisys::ops {

// Checks begin, end and the blocks that they reach before it writes anything.
void attention_cpu(const device::Stream &stream, const Tensor &out, const Tensor &q,
                   const KvLayer &kv, const AttentionLists &lists, float scale, float soft_cap,
                   const Tensor *sinks);

} // namespace llaisys::ops
