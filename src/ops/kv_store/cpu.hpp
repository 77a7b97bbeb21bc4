// CPU implementation of kv_store. Arguments are checked by op.cpp.
#pragma once

#include "ops/kv_store/op.hpp"

namespace llaisys::ops {

void kv_store_cpu(const device::Stream &stream, const KvLayer &kv, const Tensor &k, const Tensor *v,
                  const Tensor &slots);

} // namespace llaisys::ops
