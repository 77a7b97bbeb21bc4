// Writes keys and values into their slots. Contract: llaisysKvStore.
#pragma once

#include "ops/kv_layer.hpp"

namespace llaisys::ops {

// k, v [n, heads, d] strided; v null: the keys alone.
void kv_store(const device::Stream &stream, const KvLayer &kv, const Tensor &k, const Tensor *v,
              const Tensor &slots);

} // namespace llaisys::ops
