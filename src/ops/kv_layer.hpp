// Keys and values of one layer of the KV cache, in the layout of the device.
//
// KvStorage allocates them; only the kernels of kv_store, kv_load and attention know the layout.
//
// 8 bits (i8, CPU only): a head's row is head_dim bytes followed by its scale, an f32 at any
// address; value x = byte x * scale. On store scale = largest magnitude / 127 and byte = value *
// (127 / largest), rounded to nearest even. A row whose largest magnitude is below 2^-100 is zero;
// a row with a NaN or an infinity reads as NaN.
#pragma once

#include "ops/checks.hpp"

namespace llaisys::ops {

constexpr int64_t kKvScaleBytes = 4;
constexpr int64_t kMaxQuantisedHead = 1024; // largest head_dim in 8 bits

bool is_kv_dtype(DType dtype); // f32, f16, bf16 or i8

// Elements from one head's row to the next: head_dim, plus the scale in 8 bits.
int64_t head_stride(DType dtype, int64_t head_dim);

struct KvLayer {
    int64_t n_slots = 0;
    int64_t n_heads = 0;
    int64_t head_dim = 0;
    Tensor k; // CPU, CUDA: [n_slots, n_heads, head_stride]
    Tensor v; // the same shape and dtype

    int64_t head_stride() const { return ops::head_stride(k.dtype(), head_dim); }
};

// The CPU and CUDA layout of tensors [n_slots, n_heads, head_stride]; the operators check them.
KvLayer slot_major(const Tensor &k, const Tensor &v);

// Throws naming "k_cache" or "v_cache".
void check_kv(const Checks &check, const KvLayer &kv);

// Rows stored to or loaded from slots: [n, n_heads, head_dim] real, or i8 rows in cache layout:
// [n, n_heads, head_stride], contiguous.
void check_kv_rows(const Checks &check, const char *name, const Tensor &rows, const KvLayer &kv,
                   int64_t n);

} // namespace llaisys::ops
