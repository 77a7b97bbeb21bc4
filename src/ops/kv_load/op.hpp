// Reads keys and values out of their slots: the way back of kv_store, for moving slots.
#pragma once

#include "ops/kv_layer.hpp"

namespace llaisys::ops {

// k[i], v[i] = what slot slots[i] holds; k, v [n, heads, d] real, dense, or rows of eight bits as
// they lie (check_kv_rows); slots i32 [n] within the cache. v null: the keys alone.
void kv_load(const device::Stream &stream, const Tensor &k, const Tensor *v, const KvLayer &kv,
             const Tensor &slots);

} // namespace llaisys::ops
