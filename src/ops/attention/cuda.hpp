// The CUDA side of attention. All but the content of the lists has been checked: entries that are
// not inside the cache are the caller's fault and not noticed here.
#pragma once

#include "ops/attention/op.hpp"

namespace llaisys::ops {

void attention_cuda(const device::Stream &stream, const Tensor &out, const Tensor &q,
                    const KvLayer &kv, const AttentionLists &lists, float scale);

} // namespace llaisys::ops
