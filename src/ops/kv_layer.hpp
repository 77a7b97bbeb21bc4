// Keys and values of one layer of the KV cache, as a device lays them out.
//
// How the bytes lie belongs to the device: KvStorage makes them, the kernels of kv_store, kv_load and
// attention read and write them, and nobody else looks inside.
//
// Eight bits (i8, the CPU alone): a head's row is head_dim bytes and then its scale, an f32 at any
// address: value x = byte x * scale. On the way in scale = largest magnitude / 127 and byte =
// value * (127 / largest), rounded to the nearest, ties to even. A row whose largest is below 2^-100
// is all zero; one that holds a NaN or an infinity reads as NaN throughout.
#pragma once

#include "ops/checks.hpp"

namespace llaisys::ops {

constexpr int64_t kKvScaleBytes = 4;
constexpr int64_t kMaxQuantisedHead = 1024; // head_dim at most, in eight bits

bool is_kv_dtype(DType dtype); // f32, f16, bf16 or i8

// Elements from one head's row to the next: head_dim, and in eight bits the scale.
int64_t head_stride(DType dtype, int64_t head_dim);

struct KvLayer {
    int64_t n_slots = 0;
    int64_t n_heads = 0;
    int64_t head_dim = 0;
    Tensor k; // CPU, CUDA: [n_slots, n_heads, head_stride]
    Tensor v; // the same shape; in eight bits as k is

    int64_t head_stride() const { return ops::head_stride(k.dtype(), head_dim); }
};

// That layout on tensors [n_slots, n_heads, head_stride]; the operators check them.
KvLayer slot_major(const Tensor &k, const Tensor &v);

// Throws naming "k_cache" or "v_cache".
void check_kv(const Checks &check, const KvLayer &kv);

// Rows that go into slots or come out of them: [n, n_heads, head_dim] real, or i8 rows as they lie
// in the cache: [n, n_heads, head_stride], contiguous.
void check_kv_rows(const Checks &check, const char *name, const Tensor &rows, const KvLayer &kv,
                   int64_t n);

} // namespace llaisys::ops
