// Checks of the hyper-parameters that all models of the decoder family share, and their rotary
// frequencies.
#pragma once

#include "llaisys/models/decoder.h"
#include "models/model.hpp"
#include "tensor/tensor.hpp"

#include <vector>

namespace llaisys::models {

// Throws naming the field, the value and the limit.
void check_hyper_params(const LlaisysDecoderMeta &meta);

// The attention window of each layer, 0: none.
std::vector<int64_t> windows_of(const LlaisysDecoderMeta &meta);

// The sizes of one rank: attention heads, key/value heads and the inner size divided by the number of
// ranks. Throws when one of them cannot be, with the numbers. Where the site allows it, ranks that
// are a multiple of the key/value heads have one of them each: rank r has r * nkvh / ranks.
LlaisysDecoderMeta share_of(const LlaisysDecoderMeta &meta, const ModelSite &site);

// What the products of queries and keys are multiplied by.
float attention_scale(const LlaisysDecoderMeta &meta);

// f32 [dh / 2], divided as the meta asks for.
Tensor rotary_frequencies(const LlaisysDecoderMeta &meta, DeviceType device, int device_id);

} // namespace llaisys::models
