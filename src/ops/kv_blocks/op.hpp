// Moves whole blocks of slots between the KV cache and host memory, bytes as they are.
#pragma once

#include "ops/kv_layer.hpp"

namespace llaisys::ops {

enum class KvDirection { to_host, from_host };

// Where blocks lie outside of the cache. Place p of a layer: the keys of block_size slots, then
// their values, from data + p * place_stride on.
struct KvHost {
    std::byte *data;      // of Runtime::allocate_host of the stream's device
    int64_t place_stride; // bytes: a number of blocks
    int64_t n_places;
};

// Slots [blocks[i] * block_size, ... + block_size) of the layer to or from place places[i], for each
// i < n; nothing that is written may be named twice. Both arrays are the host's and have been read
// when it returns; the bytes move in order with the work of the stream.
void kv_blocks(const device::Stream &stream, KvDirection direction, const KvLayer &kv,
               int64_t block_size, const KvHost &host, const int32_t *blocks, const int32_t *places,
               int64_t n);

} // namespace llaisys::ops
