// LoRA: out += scale * B (A x), with an adapter per row. Adapters lie in slots; rows without an
// adapter have slot -1.
//
// The result of a row depends on its values and its adapter alone: the order of summation is the
// same for any other rows.
#pragma once

#include "device/runtime.hpp"
#include "tensor/tensor.hpp"

#include <algorithm>

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
    // then the LoraTiles, those with an adapter first, unused ones without rows last.
    Tensor tiles;
};

// Most rows of a tile in a step of m rows.
int64_t lora_tile_rows(int64_t m);
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

// Floats of scratch for t of m rows: parts of in_features and max_rank (rounded up).
int64_t lora_scratch(int64_t m, int64_t n_parts, int64_t in_features, int64_t max_rank);

// For each part: out[i] += scale * B (A in[i]) for the rows with an adapter. in real [m, in]; parts
// have the same slots and max_rank. scratch: f32, at least lora_scratch() values.
void lora(const device::Stream &stream, const Tensor &in, const LoraPart *parts, int n_parts,
          const LoraRows &rows, const Tensor &scratch);
decltype(lora) lora_cpu, lora_cuda;

// A product t = A x whose B t is to be added to a tensor later.
struct PendingLora {
    const LoraWeight *weight = nullptr; // null: none
    const LoraRows *rows = nullptr;
    Tensor terms; // f32 [splits, m, max_rank]: t is their sum
    int64_t splits = 0;
    Tensor in = {}; // defined: x; t has not been computed, terms are scratch of lora()
};

// out += scale * B t; does nothing for a weight of null.
void add_pending_lora(const device::Stream &stream, const Tensor &out, const PendingLora &pending);

// -- CUDA: LoRA fused into the kernels of a decoder layer ------------------------------------------
//
// t = A x is stored as a sum of terms [splits, m, n_parts, max_rank], in the order of
// LoraRows::rows:
//
//   lora_norm     RMS norm of residual + B t, and t of the products that read its result
//   lora_expand   B t of q, k and v
//   lora_shrink   t of the output projection, for ranks that lora_norm does not support
//   lora_swiglu   SwiGLU of gate + B t and up + B t, and t of the down projection

constexpr int64_t kLoraSplit = 1024;      // values of the input that one block of shrink sums
constexpr int64_t kLoraNormSplits = 8;    // terms of lora_norm: blocks of a cluster
constexpr int64_t kLoraSwigluSplit = 512; // values that one block of lora_swiglu sums
constexpr int64_t kLoraFusedRank = 64;    // largest max_rank of lora_norm and lora_swiglu
constexpr int64_t kLoraInputRank = 32;    // largest max_rank with which lora_norm computes A x

// The most terms of any kernel for an input of in_features.
inline int64_t lora_splits(int64_t in_features, int64_t max_rank) {
    const auto terms = [&](int64_t size) { return (in_features + size - 1) / size; };
    return max_rank > kLoraFusedRank ? std::max<int64_t>(1, terms(kLoraSplit))
                                     : std::max<int64_t>(kLoraNormSplits, terms(kLoraSwigluSplit));
}

void lora_expand_cuda(const device::Stream &stream, const LoraPart *parts, int n_parts,
                      const LoraRows &rows, const Tensor &terms, int64_t splits);

// A product of `in` that lora_norm adds; with a larger rank, t into terms. False: not supported for
// these sizes or dtypes; nothing was queued.
bool lora_shrink_cuda(const device::Stream &stream, const Tensor &in, const LoraWeight &weight,
                      const LoraRows &rows, const Tensor &terms, PendingLora *pending);

// Whether lora_norm_cuda and lora_swiglu_cuda support an input of in_features.
bool can_fuse_lora(const device::Stream &stream, const LoraWeight &weight, DType dtype,
                   int64_t in_features);

// residual f32 [m, in] += pending, normed = its RMS norm, and t of the n_parts weights into terms.
struct LoraNorm {
    const Tensor &residual, &weight, &normed;
    float epsilon;
};
void lora_norm_cuda(const device::Stream &stream, const LoraNorm &norm, const PendingLora &pending,
                    const LoraWeight *const *weights, int n_parts, const LoraRows &rows,
                    const Tensor &terms);

// gate.out = up * silu(gate), each with B t of its terms of lora_norm_cuda; t of down (null: none)
// into down_terms.
void lora_swiglu_cuda(const device::Stream &stream, const LoraPart *gate_up, const LoraRows &rows,
                      const Tensor &terms, const LoraWeight *down, const Tensor &down_terms,
                      PendingLora *pending);

} // namespace llaisys::ops
