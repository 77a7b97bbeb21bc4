// LoRA: out += scale * B (A x), with an adapter per row. Adapters lie in slots; rows without an
// adapter have slot -1.
//
// The result of a row depends on its values and its adapter alone: the order of summation is the
// same for any other rows.
#pragma once

#include "device/runtime.hpp"
#include "tensor/tensor.hpp"

namespace llaisys::ops {

constexpr int64_t kMaxLoraRank = 256;
constexpr int64_t kMaxLoraParts = 3;

// The adapters of one product [out, in], in n_slots slots. Memory of a rank is reserved in units of
// kLoraRankUnit and zero beyond the rank of a slot.
constexpr int64_t kLoraRankUnit = 16;
struct LoraWeight {
    Tensor a;     // [n_slots, max_rank, in]
    Tensor b;     // CPU: [n_slots, max_rank, out]; other devices: [n_slots, out, max_rank]
    Tensor slots; // i32 [n_slots, 2]: rank (0: empty), bits of the scale (f32)

    static int64_t bytes_of(DType dtype, int64_t n_slots, int64_t max_rank, int64_t out_features,
                            int64_t in_features);
    // All slots are empty.
    static LoraWeight create(const device::Stream &stream, DType dtype, int64_t n_slots,
                             int64_t max_rank, int64_t out_features, int64_t in_features);

    // Copies a [rank, in] and b [out, rank], real host tensors, in stream order.
    void set(const device::Stream &stream, int64_t slot, const Tensor &a, const Tensor &b,
             float scale) const;
    void clear(const device::Stream &stream, int64_t slot) const;

    bool defined() const { return a.defined(); }
    int64_t n_slots() const { return a.size(0); }
    int64_t max_rank() const { return a.size(1); }
    int64_t in_features() const { return a.size(2); }
    int64_t out_features() const {
        return a.device() == LLAISYS_DEVICE_CPU ? b.size(2) : b.size(1);
    }
};

// The rows of a step, grouped by slot into tiles.
struct LoraTile {
    int32_t slot;  // -1: rows without an adapter
    int32_t first; // index into LoraRows::rows
    int32_t count; // of rows
    int32_t rank;  // of the slot, a multiple of kLoraRankUnit
};
struct LoraRows {
    Tensor rows; // i32 [m]: row indices, those of a tile adjacent
    // i32 [1 + n_tiles, 4]: first the number of tiles with an adapter, of all tiles, and zeros;
    // then the LoraTiles, those with an adapter first.
    Tensor tiles;
};

// Rows of LoraRows::tiles for m rows; the same for any slots of the rows.
int64_t lora_tiles(int64_t m, int64_t n_slots);
// Fills rows [m] and tiles [lora_tiles(m, n_slots), 4] from the slots [m] of the rows. ranks
// [n_slots]: the largest rank of each slot in any product; 0: no adapter.
void group_lora_rows(const int32_t *slots, int64_t m, const int32_t *ranks, int64_t n_slots,
                     int32_t *rows, int32_t *tiles);

struct LoraPart {
    const LoraWeight *weight;
    const Tensor *out; // real [m, out], any row stride
};

// Floats of scratch that lora() needs for m rows, parts of in_features and max_rank (rounded up).
int64_t lora_scratch(int64_t m, int64_t n_parts, int64_t in_features, int64_t max_rank);

// For each part: out[i] += scale * B (A in[i]) for the rows with an adapter. in real [m, in]; parts
// have the same slots and max_rank. scratch: f32, at least lora_scratch() values.
void lora(const device::Stream &stream, const Tensor &in, const LoraPart *parts, int n_parts,
          const LoraRows &rows, const Tensor &scratch);

// lora() of gate and up, then gate.out = up * silu(gate); up.out is undefined afterwards.
void lora_swiglu(const device::Stream &stream, const Tensor &in, const LoraPart &gate,
                 const LoraPart &up, const LoraRows &rows, const Tensor &scratch);

} // namespace llaisys::ops
