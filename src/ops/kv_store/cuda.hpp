// CUDA side of kv_store. Arguments have been checked.
#pragma once

#include "ops/kv_store/op.hpp"

namespace llaisys::ops {

// A slot outside the cache is skipped: padding rows have slot -1.
void kv_store_cuda(const device::Stream &stream, const KvLayer &kv, const Tensor &k,
                   const Tensor *v, const Tensor &slots);

} // namespace llaisys::ops
