// CPU implementation of kv_load. Arguments are checked by op.cpp.
#pragma once

#include "ops/kv_load/op.hpp"

namespace llaisys::ops {

void kv_load_cpu(const device::Stream &stream, const Tensor &k, const Tensor *v, const KvLayer &kv,
                 const Tensor &slots);

} // namespace llaisys::ops
