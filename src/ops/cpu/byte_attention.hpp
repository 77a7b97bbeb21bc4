// Attention over keys in eight bits by byte products, for machines that have instructions for them;
// elsewhere Kernels::attention_span widens the keys.
#pragma once

#include "ops/cpu/kernels.hpp"

namespace llaisys::ops::cpu {

constexpr int64_t kMaxByteHead = 1024; // d at most

struct ByteAttention {
    // Rounds the d values of a scaled query to 16 bits (15 with more than 512 of them) of the
    // largest and leaves them in the row as attention_span wants them. A query with a NaN or an
    // infinity gives NaN scores.
    void (*prepare)(float *row, int64_t d);
    // Kernels::attention_span of prepared queries; both caches are i8.
    void (*attention_span)(const AttentionTask &task, const AttentionState &state, int64_t first,
                           int64_t last);
};

// What goes with kernels() on this machine; null when that is nothing.
const ByteAttention *byte_attention();

// For tests: whether byte_attention() may return something from now on.
void allow_byte_attention(bool allowed);

} // namespace llaisys::ops::cpu
