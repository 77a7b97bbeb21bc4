// Keys and values of one layer of the KV cache, in the layout of the device.
//
// KvStorage allocates them; only the kernels of kv_store, kv_load, kv_blocks and attention know the
// layout.
//
// 8 bits (i8; f8_e4m3 on CUDA only): each head of a token has a scale, an f32; value x = byte x *
// scale. On store scale = largest magnitude / kLargest (127; 448 for f8_e4m3) and byte = value *
// (kLargest / largest magnitude), rounded to nearest even. A row whose largest magnitude is below
// 2^-100 is zero; a row with a NaN or an infinity reads as NaN.
//   CPU   a head's row is head_dim bytes followed by its scale, at any address
//   CUDA  bytes [n_slots, n_heads, head_dim], then scales [n_heads, n_slots] in the same tensor
#pragma once

#include "ops/checks.hpp"

namespace llaisys::ops {

constexpr int64_t kKvScaleBytes = 4;
constexpr int64_t kMaxQuantisedHead = 1024; // largest head_dim in 8 bits

bool is_kv_dtype(DType dtype);   // f32, f16, bf16, i8 or f8_e4m3
bool is_eight_bits(DType dtype); // i8 or f8_e4m3

// Elements of one head of a token: head_dim, plus the scale in 8 bits.
int64_t head_stride(DType dtype, int64_t head_dim);

struct KvLayer {
    int64_t n_slots = 0;
    int64_t n_heads = 0;
    int64_t head_dim = 0;
    Tensor k;              // [n_slots, n_heads, head_stride]
    Tensor v;              // the same shape and dtype; undefined: the first value_dim of each key
    int64_t value_dim = 0; // of a value; head_dim if v is defined

    bool has_values() const { return v.defined(); } // beside the keys
    // The tensor that holds the values.
    const Tensor &values() const { return has_values() ? v : k; }
    int64_t head_stride() const { return ops::head_stride(k.dtype(), head_dim); }
};

// The CPU and CUDA layout of tensors [n_slots, n_heads, head_stride]; the operators check them.
KvLayer slot_major(const Tensor &k, const Tensor &v);
// Keys that contain their values: the first value_dim of each. Not with 8 bits.
KvLayer slot_major(const Tensor &k, int64_t value_dim);

// Throws naming "k_cache" or "v_cache".
void check_kv(const Checks &check, const KvLayer &kv);

// Throws when the keys contain the values.
void check_has_values(const Checks &check, const KvLayer &kv);

// Rows stored to or loaded from slots: [n, n_heads, head_dim] real, or 8-bit rows of the dtype and
// layout of a cache of n slots: [n, n_heads, head_stride], contiguous.
void check_kv_rows(const Checks &check, const char *name, const Tensor &rows, const KvLayer &kv,
                   int64_t n);

} // namespace llaisys::ops
