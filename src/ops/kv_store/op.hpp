// Write keys and values to slots (contract: llaisysKvStore), read them back, for moving slots, and
// copy whole blocks of slots to and from host memory.
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

enum class KvDirection { to_host, from_host };

// Host slots for blocks. Host slot p of a layer: the keys of block_size slots, then their values,
// from data + p * slot_stride_bytes on.
struct KvHost {
    std::byte *data;           // from Runtime::allocate_host of the stream's device
    int64_t slot_stride_bytes; // bytes from one host slot to the next
    int64_t n_slots;
};

// Copy slots [blocks[i] * block_size, ... + block_size) of the layer to or from host slot
// host_slots[i], for each i < n; destinations must be distinct. Both arrays are in host memory and have
// been read on return; the copies run in stream order.
void kv_blocks(const device::Stream &stream, KvDirection direction, const KvLayer &kv,
               int64_t block_size, const KvHost &host, const int32_t *blocks,
               const int32_t *host_slots, int64_t n);
decltype(kv_blocks) kv_blocks_cpu, kv_blocks_cuda;

} // namespace llaisys::ops
