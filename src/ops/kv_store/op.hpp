// Write keys and values to slots. Contract: llaisysKvStore.
#pragma once

#include "ops/kv_layer.hpp"

namespace llaisys::ops {

// k, v [n, heads, d] strided, or 8-bit rows in cache layout (check_kv_rows); v null: keys only.
void kv_store(const device::Stream &stream, const KvLayer &kv, const Tensor &k, const Tensor *v,
              const Tensor &slots);
decltype(kv_store) kv_store_cpu;
decltype(kv_store) kv_store_cuda; // skips slots outside the cache: padding rows have slot -1

} // namespace llaisys::ops
