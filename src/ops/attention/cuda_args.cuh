// Arguments of the attention kernels, and the mapping from a position of a sequence to a KV slot.
#pragma once

#include "ops/cuda/common.cuh"

namespace llaisys::ops::cuda {

struct AttentionArgs {
    const void *q;           // [tokens, heads, d]
    int64_t q_token, q_head; // strides, in elements
    void *out;
    int64_t out_token, out_head;
    const void *k; // [slots, kv_heads, d]
    const void *v;
    const float *k_scales, *v_scales;    // 8-bit caches: [kv_heads, n_slots]
    int64_t n_slots;                     // of 8-bit caches
    const int32_t *q_rows, *begin, *end; // [tokens]
    const int32_t *tables;               // [rows, width]
    const int32_t *width_at;             // when not null, the width is read from here
    int32_t width;
    int32_t block_size;
    int32_t block_shift;     // log2 of block_size; 0: block_size is 1 or no power of two
    int32_t kv_heads, group; // group: query heads per KV head
    float scale_log2;        // softmax scale times log2(e); with a soft cap: the cap times log2(e)
    float cap_scale;         // softmax scale / soft cap; 0: no soft cap
    const float *sinks;      // [heads]; null: none
    bool are_settled;        // see AttentionLists

    __device__ __forceinline__ const int32_t *table_of(int token) const {
        const int64_t step = width_at != nullptr ? *width_at : width;
        return tables + int64_t(q_rows[token]) * step;
    }
    // Softmax denominator of query head `head`: the sum of exp2(score - max) and the sink.
    __device__ __forceinline__ float with_sink(int head, float max, float sum) const {
        return sinks == nullptr ? sum : sum + exp2f(sinks[head] * 1.4426950408889634f - max);
    }
    // KV slot of position e of a block table row.
    __device__ __forceinline__ int64_t slot_of(const int32_t *table, int e) const {
        if (block_shift > 0) {
            return (int64_t(table[e >> block_shift]) << block_shift) + (e & (block_size - 1));
        }
        return block_size == 1 ? table[e]
                               : int64_t(table[e / block_size]) * block_size + e % block_size;
    }
};

// tanh(score * cap_scale): to be multiplied by scale_log2. The score itself without a soft cap.
__device__ __forceinline__ float soft_capped(float score, float cap_scale) {
    if (cap_scale == 0) {
        return score;
    }
    const float e = exp2f(score * (cap_scale * (2 * 1.4426950408889634f)));
    return 1.0f - __fdividef(2.0f, e + 1.0f);
}

inline int32_t block_shift_of(int32_t block_size) {
    int32_t shift = 0;
    while ((2 << shift) <= block_size) {
        ++shift;
    }
    return block_size == 1 << shift ? shift : 0;
}

// Bytes of a row of D 16-bit values in a tile: whole swizzle periods of 8 chunks.
template <int D> constexpr int kTileRowBytes = (D + 63) / 64 * 128;

// Byte offset of 16-byte chunk `chunk` of row `row` in a tile of rows of D 16-bit values, swizzled
// so that the 8 rows of an ldmatrix hit different banks.
template <int D> __device__ __forceinline__ uint32_t tile_offset(int row, int chunk) {
    return uint32_t(row * kTileRowBytes<D> + ((chunk ^ (row & 7)) << 4));
}

} // namespace llaisys::ops::cuda
