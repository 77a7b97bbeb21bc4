// Writes keys and values into their slots. Contract: llaisysKvStore.
#pragma once

#include "ops/kv_layer.hpp"

namespace llaisys::ops {

// k, v [n, heads, d] strided, or rows of eight bits as they lie (check_kv_rows); v null: the keys
// alone.
void kv_store(const device::Stream &stream, const KvLayer &kv, const Tensor &k, const Tensor *v,
              const Tensor &slots);

} // namespace llaisys::ops
