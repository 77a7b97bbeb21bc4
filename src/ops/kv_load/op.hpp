// Read keys and values from slots: the inverse of kv_store, for moving slots.
#pragma once

#include "ops/kv_layer.hpp"

namespace llaisys::ops {

// k[i], v[i] = contents of slot slots[i]; k, v [n, heads, d] real, dense, or 8-bit rows in cache
// layout (check_kv_rows); slots i32 [n] within the cache. v null: keys only.
void kv_load(const device::Stream &stream, const Tensor &k, const Tensor *v, const KvLayer &kv,
             const Tensor &slots);
decltype(kv_load) kv_load_cpu, kv_load_cuda;

} // namespace llaisys::ops
