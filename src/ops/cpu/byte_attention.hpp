// Attention over 8-bit keys by byte products, for machines with such instructions; elsewhere
// Kernels::attention_span widens the keys.
#pragma once

#include "ops/cpu/kernels.hpp"

namespace llaisys::ops::cpu {

constexpr int64_t kMaxByteHead = 1024; // largest d

struct ByteAttention {
    // Rounds the d values of a scaled query to 16 bits (15 for more than 512 values) relative to
    // the largest and stores them in the layout of attention_span. A query with a NaN or an
    // infinity yields NaN scores.
    void (*prepare)(float *row, int64_t d);
    // Kernels::attention_span of prepared queries; both caches are i8.
    void (*attention_span)(const AttentionTask &task, const AttentionState &state, int64_t first,
                           int64_t last);
};

// The implementation that matches kernels() on this machine; null if there is none.
const ByteAttention *byte_attention();

// For tests: enable or disable byte_attention().
void allow_byte_attention(bool allowed);

} // namespace llaisys::ops::cpu
