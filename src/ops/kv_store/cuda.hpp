// The CUDA side of kv_store. Arguments have been checked.
#pragma once

#include "ops/kv_store/op.hpp"

namespace llaisys::ops {

// A slot outside the cache is left out: rows that only fill a graph up have slot -1.
void kv_store_cuda(const device::Stream &stream, const KvLayer &kv, const Tensor &k,
                   const Tensor *v, const Tensor &slots);

} // namespace llaisys::ops
