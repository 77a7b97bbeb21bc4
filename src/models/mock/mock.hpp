// A model small enough to be written down in a test: one attention layer without projections and a
// tied table. It uses the real KV cache, rotary embedding and attention, so that everything around
// a model can be tried on it.
//
//   x = table[token];  q = rope(x), k = rope(x[: nkvh * dh]), v = x[: nkvh * dh]
//   hidden = attention(q, k, v), logits = hidden * table^T           with nh * dh = hs, nlayer = 1
#pragma once

#include "models/slot_model.hpp"

#include "llaisys/models/decoder.h"

namespace llaisys::models {

class MockModel final : public SlotModel<LlaisysDecoderWeights> {
public:
    MockModel(const LlaisysDecoderMeta &meta, const ModelSite &site);

    int64_t workspace_bytes(int64_t n_tokens, int64_t n_outputs) const override;
    void forward(const device::Stream &stream, runtime::Workspace &workspace,
                 const ModelInput &input, const AttentionMetadata &attention,
                 ForwardOutput *output) override;

private:
    // Every buffer of a forward over n tokens, f32 [n, nh, dh].
    struct Activations {
        Tensor x, q, attn_out;
    };
    Activations take_activations(runtime::Workspace &workspace, int64_t n) const;

    LlaisysDecoderMeta meta_;     // what it points to is not kept
    float scale_;                 // of attention
    runtime::PackedWeight embed_; // of in_embed: read by rows, and the head
};

} // namespace llaisys::models
