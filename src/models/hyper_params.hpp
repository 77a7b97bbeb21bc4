// The hyper-parameters that all models of the decoder family share: what they may be, and what follows
// from them.
#pragma once

#include "llaisys/models/decoder.h"
#include "models/model.hpp"

namespace llaisys::models {

// Returns the meta, or throws naming the field, the value and the limit.
const LlaisysDecoderMeta &check_hyper_params(const LlaisysDecoderMeta &meta);

// The meta for keeping: what it points to is the caller's.
LlaisysDecoderMeta without_pointers(LlaisysDecoderMeta meta);

// The sizes of one rank: attention heads, key/value heads and the inner size divided by the number of
// ranks. Throws when one of them cannot be, with the numbers. Where the site allows it, ranks that
// are a multiple of the key/value heads have one of them each: rank r has r * nkvh / ranks.
LlaisysDecoderMeta share_of(const LlaisysDecoderMeta &meta, const ModelSite &site);

// What the products of queries and keys are multiplied by.
float attention_scale(const LlaisysDecoderMeta &meta);

// What a model is whose heads on this rank the meta gives.
ModelSpec spec_of(LlaisysModelType type, const LlaisysDecoderMeta &meta, const ModelSite &site);

} // namespace llaisys::models
