// A model small enough to be written down in a test: one attention layer without projections and a
// tied table. It uses the real KV cache, rotary embedding and attention, so that everything around
// a model can be tried on it.
//
//   x = table[token];  q = rope(x), k = rope(x[: nkvh * dh]), v = x[: nkvh * dh]
//   hidden = attention(q, k, v), logits = hidden * table^T           with nh * dh = hs, nlayer = 1
#pragma once

#include "models/model.hpp"
#include "runtime/weights/packed_weights.hpp"

#include "llaisys/models/decoder.h"

namespace llaisys::models {

class MockModel final : public Model {
public:
    MockModel(const LlaisysDecoderMeta &meta, const ModelSite &site);

    LlaisysModelType type() const override { return LLAISYS_MODEL_TYPE_MOCK; }
    const KvSpec &kv_spec() const override { return kv_spec_; }
    int64_t vocabulary() const override { return int64_t(meta_.voc); }
    int64_t hidden_size() const override { return int64_t(meta_.hs); }
    int64_t max_positions() const override { return int64_t(meta_.maxseq); }
    const std::vector<int64_t> &windows() const override { return windows_; }
    void *weights() override { return &weights_; }
    void replace_weight(const device::Stream &stream, const char *field, int layer,
                        llaisysTensor_t handle) override {
        packed_.replace(stream, field, layer, handle);
    }
    void prepare_weights(const device::Stream &stream) override { packed_.prepare(stream); }
    uint64_t weights_version() const override { return packed_.version(); }
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

    LlaisysDecoderMeta meta_; // what it points to is not kept
    float scale_ = 0;         // of attention
    std::vector<int64_t> windows_;
    LlaisysDecoderWeights weights_{};
    runtime::PackedWeight embed_; // of in_embed: read by rows, and the head
    runtime::WeightTable table_;
    runtime::PackedWeights packed_;
    KvSpec kv_spec_;
};

} // namespace llaisys::models
