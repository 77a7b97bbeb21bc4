// CUDA side of kv_load. Arguments have been checked.
#pragma once

#include "ops/kv_load/op.hpp"

namespace llaisys::ops {

void kv_load_cuda(const device::Stream &stream, const Tensor &k, const Tensor *v, const KvLayer &kv,
                  const Tensor &slots);

} // namespace llaisys::ops
