// Keys and values of one layer of the KV cache, as a device lays them out.
//
// How the bytes lie belongs to the device: KvStorage makes them, the kernels of kv_store, kv_load and
// attention read and write them, and nobody else looks inside.
#pragma once

#include "ops/checks.hpp"

namespace llaisys::ops {

struct KvLayer {
    int64_t n_slots = 0;
    int64_t n_heads = 0;
    int64_t head_dim = 0;
    Tensor k; // CPU, CUDA: [n_slots, n_heads, head_dim]
    Tensor v; // the same shape
};

// That layout on tensors [n_slots, n_heads, head_dim]; the operators check them.
KvLayer slot_major(const Tensor &k, const Tensor &v);

// Throws naming "k_cache" or "v_cache".
void check_kv(const Checks &check, const KvLayer &kv);

} // namespace llaisys::ops
