// The bytes of the KV cache: for every layer keys and values apart, each [n_slots, heads, dim],
// allocated once. Which slot belongs to whom is not known here.
#pragma once

#include "device/runtime.hpp"
#include "tensor/tensor.hpp"

#include <vector>

namespace llaisys::runtime {

class KvStorage {
public:
    // inv_freq: f32 [head_dim / 2], the rotary frequencies of the keys.
    KvStorage(DeviceType device, int device_id, int64_t n_layers, int64_t n_slots, int64_t n_heads,
              int64_t head_dim, DType dtype, Tensor inv_freq);

    int64_t n_layers() const { return int64_t(keys_.size()); }
    int64_t n_slots() const { return n_slots_; }
    int64_t bytes() const;
    const Tensor &keys(int64_t layer) const { return keys_[size_t(layer)]; }
    const Tensor &values(int64_t layer) const { return values_[size_t(layer)]; }

    // Both take slots in [0, n_slots), no written slot twice.
    // Slot src[i] to dst[i] in all layers, as if all were read before the first is written.
    // Allocates scratch for n rows before anything is changed.
    void copy_slots(const device::Stream &stream, const int32_t *src, const int32_t *dst,
                    int64_t n);
    // Rotates the keys of slots[i] by delta[i] positions in all layers. Allocates nothing.
    void shift_slots(const device::Stream &stream, const int32_t *slots, const int64_t *delta,
                     int64_t n);

private:
    // Copies the slots of one cache into rows [n, heads, dim].
    static void gather(const device::Stream &stream, const Tensor &cache, const int32_t *slots,
                       int64_t n, const Tensor &rows);

    int64_t n_slots_;
    Tensor inv_freq_;
    std::vector<Tensor> keys_;
    std::vector<Tensor> values_;
    // Scratch of shift_slots, which works in pieces of as many slots.
    Tensor shift_rows_;   // [kShiftRows, heads, dim]
    Tensor shift_slots_;  // i32 [kShiftRows]
    Tensor shift_deltas_; // i64 [kShiftRows]
};

} // namespace llaisys::runtime
