// The bytes of the KV cache, layer by layer, allocated once. Which slot belongs to whom is not known
// here; how a slot lies in memory is known here and to the device's kernels alone.
#pragma once

#include "ops/kv_layer.hpp"

#include <vector>

namespace llaisys::runtime {

class KvStorage {
public:
    // inv_freq: f32 [head_dim / 2], the rotary frequencies of the keys.
    KvStorage(const device::Stream &stream, int64_t n_layers, int64_t n_slots, int64_t n_heads,
              int64_t head_dim, DType dtype, Tensor inv_freq);

    const std::vector<ops::KvLayer> &layers() const { return layers_; }
    int64_t bytes() const;

    // Both take slots in [0, n_slots), no written slot twice.
    // Slot src[i] to dst[i] in all layers, as if all were read before the first is written.
    // Allocates scratch for n rows before anything is changed.
    void copy_slots(const device::Stream &stream, const int32_t *src, const int32_t *dst,
                    int64_t n);
    // Rotates the keys of slots[i] by delta[i] positions in all layers. Allocates nothing. Keys in
    // eight bits are rotated in f32 and quantised again, with a new scale.
    void shift_slots(const device::Stream &stream, const int32_t *slots, const int64_t *delta,
                     int64_t n);

private:
    DType dtype_;
    Tensor inv_freq_;
    std::vector<ops::KvLayer> layers_;
    // Scratch of shift_slots, which works in pieces of as many slots.
    Tensor shift_rows_;   // [kShiftRows, heads, dim]
    Tensor shift_slots_;  // i32 [kShiftRows]
    Tensor shift_deltas_; // i64 [kShiftRows]
};

} // namespace llaisys::runtime
