// Rotary position embedding with explicit positions. Contract: llaisysRope.
#pragma once

#include "device/runtime.hpp"
#include "tensor/tensor.hpp"

namespace llaisys::ops {

// factor: multiplies sines and cosines. A pair whose frequency is 0 is copied unchanged.
void rope(const device::Stream &stream, const Tensor &out, const Tensor &in,
          const Tensor &positions, const Tensor &inv_freq, float factor = 1.0f);
decltype(rope) rope_cpu, rope_cuda;

// rope() of queries and keys, each in place. The CPU computes the angles of a token once for both.
void rope_both(const device::Stream &stream, const Tensor &q, const Tensor &k,
               const Tensor &positions, const Tensor &inv_freq, float factor = 1.0f);
decltype(rope_both) rope_both_cpu;

// The frequencies of a layer: inv_freq is f32 [d / 2] for all layers, or [layers, d / 2].
Tensor layer_frequencies(const Tensor &inv_freq, int64_t layer);

} // namespace llaisys::ops
