// LoRA adapters of q, k and v, biases, RoPE and KV store in one kernel.
#pragma once

#include "ops/decoder_layer/cuda_epilogues.cuh"
#include "ops/lora/op.hpp"

namespace llaisys::ops::cuda {

// Whether the kernel supports the head size; no QK norm, caches of type T.
bool can_lora_rope(int64_t head_dim);

// qkv as for rope_kv_store. weights: of q, k and v; terms: their t, of lora_norm_cuda.
template <typename T>
void lora_rope_kv_store(const device::CudaStream &stream, const RopeKvStore<T> &pairs,
                        const LoraWeight *const *weights, const LoraRows &rows, const Tensor &terms,
                        const T *qkv, int64_t ld);

} // namespace llaisys::ops::cuda
