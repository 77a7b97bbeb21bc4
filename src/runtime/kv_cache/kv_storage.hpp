// The bytes of the KV cache, one pair of tensors per layer (one tensor where the keys contain the
// values), allocated once. Owners of slots are
// tracked elsewhere; the memory layout of a slot is private to this class and the device's kernels.
#pragma once

#include "ops/kv_layer.hpp"

#include <vector>

namespace llaisys::runtime {

class KvStorage {
public:
    // inv_freq: f32 [d / 2] or [n_layers, d / 2], the rotary frequencies of the last d values of a
    // key. value_dim: 0, or the keys contain the values, their first value_dim; not with 8 bits.
    KvStorage(const device::Stream &stream, int64_t n_layers, int64_t n_slots, int64_t n_heads,
              int64_t head_dim, DType dtype, Tensor inv_freq, int64_t value_dim = 0);

    const std::vector<ops::KvLayer> &layers() const { return layers_; }
    int64_t bytes() const;

    // Slots are in [0, n_slots); written slots are distinct.
    // Copies slot src[i] to dst[i] in all layers, as if all were read before the first is written.
    // Allocates scratch for n rows before it changes anything.
    void copy_slots(const device::Stream &stream, const int32_t *src, const int32_t *dst,
                    int64_t n);
    // Rotates the keys of slots[i] by delta[i] positions in all layers. Allocates nothing. 8-bit
    // keys are rotated in f32 and quantised again with a new scale.
    void shift_slots(const device::Stream &stream, const int32_t *slots, const int64_t *delta,
                     int64_t n);

private:
    DType dtype_;
    Tensor inv_freq_;
    std::vector<ops::KvLayer> layers_;
    // Scratch of shift_slots, which processes kShiftRows slots at a time.
    Tensor shift_rows_;   // [kShiftRows, heads, dim]
    Tensor shift_slots_;  // i32 [kShiftRows]
    Tensor shift_deltas_; // i64 [kShiftRows]
};

} // namespace llaisys::runtime
