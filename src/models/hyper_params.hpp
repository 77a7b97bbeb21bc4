// Checks of the hyper-parameters that all models of the decoder family share, and their rotary
// frequencies.
#pragma once

#include "llaisys/models/qwen2.h"
#include "tensor/tensor.hpp"

namespace llaisys::models {

// Throws naming the field, the value and the limit.
void check_hyper_params(const LlaisysQwen2Meta &meta);

// f32 [dh / 2] with the scaling that the meta asks for.
Tensor rotary_frequencies(const LlaisysQwen2Meta &meta, DeviceType device, int device_id);

} // namespace llaisys::models
