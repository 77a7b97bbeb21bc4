// EAGLE, EAGLE-3 and MTP draft heads: see include/llaisys/models/draft_head.h. Not sharded.
#pragma once

#include "models/slot_model.hpp"
#include "ops/decoder_layer/op.hpp"

#include "llaisys/models/draft_head.h"

namespace llaisys::models {

class DraftHead final : public SlotModel<LlaisysDraftHeadWeights> {
public:
    DraftHead(const LlaisysDraftHeadMeta &meta, const ModelPlacement &placement);

    int64_t aux_hidden_size() const override { return spec().hidden_size; }
    int64_t workspace_bytes(int64_t n_tokens, int64_t n_outputs) const override;
    void forward(const device::Stream &stream, runtime::Workspace &workspace,
                 const ModelInput &input, const AttentionMetadata &attention,
                 ForwardOutput *output) override;

private:
    // Buffers of a forward over n tokens: f32 on the CPU; elsewhere inputs of products and
    // attention have the weights' dtype.
    struct Activations {
        Tensor residual, fused;        // f32 [n, hs]
        Tensor normed, token;          // [n, hs]
        Tensor feature;                // [n, feature size]; only when products need a cast
        Tensor q, q_token, attn_out;   // [n, nh * dh]
        Tensor k, k_token, v, v_token; // [n, nkvh * dh]
        Tensor gate, up;               // [n, di]
    };

    bool is(LlaisysDraftHeadKind kind) const { return meta_.kind == kind; }
    void register_slots();
    Activations allocate_activations(runtime::Workspace &workspace, int64_t n) const;
    // Writes act.token (embeddings) and act.residual (start of the residual stream).
    void fuse(const device::Stream &stream, const ModelInput &input, const Activations &act) const;
    void project(const device::Stream &stream, const Activations &act) const; // q, k, v
    void attend(const device::Stream &stream, const ModelInput &input,
                const AttentionMetadata &attention, const Activations &act,
                ops::Residual *residual) const;
    void finish(const device::Stream &stream, const ModelInput &input, const Activations &act,
                ops::Residual *residual, ForwardOutput *output) const;
    void norm(const device::Stream &stream, const Tensor &out, const Tensor &in,
              llaisysTensor_t weight) const;
    // `in` [n, size] f32 cast to the activation dtype: itself, or `buffer`.
    const Tensor &to_activation_dtype(const device::Stream &stream, const Tensor &in,
                                      const Tensor &buffer) const;

    LlaisysDraftHeadMeta meta_; // pointers of its decoder are null
    float scale_;               // of attention
    runtime::PackedWeight in_embed_, out_embed_, feature_, fuse_token_, fuse_hidden_;
    Tensor row_indices_; // i64 0, 1, ...: at least the tokens of a forward; not on the CPU
    runtime::PackedWeight q_, k_, v_, q_token_, k_token_, v_token_, o_, gate_, up_, down_;
};

} // namespace llaisys::models
