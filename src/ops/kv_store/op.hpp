// Write keys and values to slots (contract: llaisysKvStore), and read them back, for moving slots.
#pragma once

#include "ops/kv_layer.hpp"

namespace llaisys::ops {

// k, v [n, heads, d] strided, or 8-bit rows in cache layout (check_kv_rows); v null: keys only.
void kv_store(const device::Stream &stream, const KvLayer &kv, const Tensor &k, const Tensor *v,
              const Tensor &slots);
decltype(kv_store) kv_store_cpu;
decltype(kv_store) kv_store_cuda; // skips slots outside the cache: padding rows have slot -1

// k[i], v[i] = contents of slot slots[i]; k and v as in kv_store(), dense; slots i32 [n] within the
// cache.
void kv_load(const device::Stream &stream, const Tensor &k, const Tensor *v, const KvLayer &kv,
             const Tensor &slots);
decltype(kv_load) kv_load_cpu, kv_load_cuda;

} // namespace llaisys::ops
