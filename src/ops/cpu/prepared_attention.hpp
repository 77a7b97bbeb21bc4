// Attention with queries in another form than f32, for machines with instructions for it: tile registers
// with a bf16 or 8-bit cache, dot products of pairs with a bf16 cache (both round weights to bf16); byte
// products with an 8-bit cache elsewhere. Otherwise Kernels::attention_span widens the keys.
#pragma once

#include "ops/cpu/kernels.hpp"

namespace llaisys::ops::cpu {

constexpr int64_t kMaxByteHead = 1024; // largest d with 8-bit keys
constexpr int64_t kMaxTileHead = 1024; // largest d in tile registers

struct PreparedAttention {
    // Stores n scaled queries of d values, all rows of one KV head of a task, in the layout of
    // attention_span, in place of their rows, which are ldq floats apart. They are rounded to bf16; for
    // byte products to 16 bits (15 for more than 512 values) relative to the largest. The output of a
    // query with a NaN or an infinity is NaN.
    void (*prepare)(float *q, int64_t n, int64_t ldq, int64_t d);
    // Kernels::attention_span of prepared queries; the dtypes are those of prepared_attention().
    void (*attention_span)(const AttentionTask &task, const AttentionState &state, int64_t first,
                           int64_t last);
    int64_t rows; // query rows of a task that share a tile of keys and values profitably
};

// The implementation for keys of d values of these dtypes that matches kernels() on this machine;
// null if there is none.
const PreparedAttention *prepared_attention(DType keys, DType values, int64_t d);

// For tests: enable or disable prepared_attention().
void allow_prepared_attention(bool allowed);

} // namespace llaisys::ops::cpu
