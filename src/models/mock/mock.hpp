// Minimal model for tests: one attention layer without projections and a tied embedding. It uses
// the real KV cache, rotary embedding and attention.
//
//   x = table[token];  q = rope(x), k = rope(x[: nkvh * dh]), v = x[: nkvh * dh]
//   hidden = attention(q, k, v), logits = hidden * table^T           with nh * dh = hs, nlayer = 1
#pragma once

#include "models/slot_model.hpp"

#include "llaisys/models/decoder.h"

namespace llaisys::models {

class MockModel final : public SlotModel<LlaisysDecoderWeights> {
public:
    MockModel(const LlaisysDecoderMeta &meta, const ModelPlacement &placement);

    int64_t workspace_bytes(int64_t n_tokens, int64_t n_outputs) const override;
    void forward(const device::Stream &stream, runtime::Workspace &workspace,
                 const ModelInput &input, const AttentionMetadata &attention,
                 ForwardOutput *output) override;

private:
    // Buffers of a forward over n tokens, f32 [n, nh, dh].
    struct Activations {
        Tensor x, q, attn_out;
    };
    Activations allocate_activations(runtime::Workspace &workspace, int64_t n) const;

    LlaisysDecoderMeta meta_;     // its pointers are null
    float scale_;                 // of attention
    runtime::PackedWeight embed_; // in_embed: embedding and head
};

} // namespace llaisys::models
