// A head that drafts: see include/llaisys/models/draft_head.h. One rank has it whole.
#pragma once

#include "models/slot_model.hpp"
#include "ops/decoder_layer/op.hpp"

#include "llaisys/models/draft_head.h"

#include <vector>

namespace llaisys::models {

class DraftHead final : public SlotModel<LlaisysDraftHeadWeights> {
public:
    DraftHead(const LlaisysDraftHeadMeta &meta, const ModelSite &site);

    int64_t kept_hidden() const override { return spec().hidden_size; }
    int64_t workspace_bytes(int64_t n_tokens, int64_t n_outputs) const override;
    void forward(const device::Stream &stream, runtime::Workspace &workspace,
                 const ModelInput &input, const AttentionMetadata &attention,
                 ForwardOutput *output) override;

private:
    // Every buffer of a forward over n tokens: f32 on the CPU; elsewhere those that products read
    // or attention sees are of the weights' dtype.
    struct Activations {
        Tensor residual, fused;        // f32 [n, hs]
        Tensor normed, token;          // [n, hs]
        Tensor feature;                // [n, feature size]; only where products need it
        Tensor q, q_token, attn_out;   // [n, nh * dh]
        Tensor k, k_token, v, v_token; // [n, nkvh * dh]
        Tensor gate, up;               // [n, di]
    };

    bool is(LlaisysDraftHeadKind kind) const { return meta_.kind == kind; }
    DType activation_dtype() const;
    void register_slots();
    Activations take_activations(runtime::Workspace &workspace, int64_t n) const;
    // act.token: the embeddings; act.residual: where the residual stream begins.
    void fuse(const device::Stream &stream, const ModelInput &input, const Activations &act) const;
    void project(const device::Stream &stream, const Activations &act) const; // q, k, v
    void attend(const device::Stream &stream, const ModelInput &input,
                const AttentionMetadata &attention, const Activations &act,
                ops::Residual *residual) const;
    void finish(const device::Stream &stream, const ModelInput &input, const Activations &act,
                ops::Residual *residual, ForwardOutput *output) const;
    void norm(const device::Stream &stream, const Tensor &out, const Tensor &in,
              llaisysTensor_t weight) const;
    // `in` [n, size] f32 as products want it: itself, or `room` with its values rounded.
    const Tensor &rounded(const device::Stream &stream, const Tensor &in, const Tensor &room) const;

    LlaisysDraftHeadMeta meta_; // what its decoder points to is not kept
    float scale_;               // of attention
    runtime::PackedWeight in_embed_, out_embed_, feature_, fuse_token_, fuse_hidden_;
    Tensor counting_; // i64: 0, 1, ..; at least as many as a forward has tokens, not on the CPU
    runtime::PackedWeight q_, k_, v_, q_token_, k_token_, v_token_, o_, gate_, up_, down_;
};

} // namespace llaisys::models
