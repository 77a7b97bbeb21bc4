// Hyper-parameters of the decoder family: checks and derived values.
#pragma once

#include "llaisys/models/decoder.h"
#include "models/model.hpp"

namespace llaisys::models {

// Returns the meta; throws naming the field, the value and the limit.
const LlaisysDecoderMeta &check_hyper_params(const LlaisysDecoderMeta &meta);

// The meta with null pointers: the arrays belong to the caller.
LlaisysDecoderMeta without_pointers(LlaisysDecoderMeta meta);

// The sizes of one rank: attention heads, key/value heads and intermediate size divided by the
// number of ranks. Throws when one is not divisible. With replicate_kv_heads, ranks that are a
// multiple of the key/value heads hold one each: rank r has head r * nkvh / ranks. Latent attention
// has its one head on every rank.
LlaisysDecoderMeta shard_meta(const LlaisysDecoderMeta &meta, const ModelPlacement &placement);

// A multiplier of the meta, where 0 is none.
inline float or_one(float factor) { return factor != 0 ? factor : 1.0f; }

// Scale of the attention scores.
float attention_scale(const LlaisysDecoderMeta &meta);

// The spec of a model; the meta has the sizes of this rank.
ModelSpec spec_of(LlaisysModelType type, const LlaisysDecoderMeta &meta,
                  const ModelPlacement &placement);

} // namespace llaisys::models
