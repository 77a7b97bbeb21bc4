// RMS norm, optionally of a sum that is stored before it, and layer norm. Contracts: llaisysRmsNorm,
// llaisysAddRmsNorm.
#pragma once

#include "device/runtime.hpp"
#include "tensor/tensor.hpp"

namespace llaisys::ops {

void rms_norm(const device::Stream &stream, const Tensor &out, const Tensor &in,
              const Tensor &weight, float epsilon);
decltype(rms_norm) rms_norm_cpu, rms_norm_cuda;

void add_rms_norm(const device::Stream &stream, const Tensor &out, const Tensor &residual,
                  const Tensor &in, const Tensor &weight, float epsilon);
decltype(add_rms_norm) add_rms_norm_cpu, add_rms_norm_cuda;

// out[i] = (in[i] - mean) / sqrt(variance + epsilon) * weight + bias over the last dimension; in, out
// [n, d] real strided, weight, bias [d] real, bias null: none. out may be in.
void layer_norm(const device::Stream &stream, const Tensor &out, const Tensor &in,
                const Tensor &weight, const Tensor *bias, float epsilon);
decltype(layer_norm) layer_norm_cpu, layer_norm_cuda;

} // namespace llaisys::ops
