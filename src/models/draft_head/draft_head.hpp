// A head that drafts: see include/llaisys/models/draft_head.h. One rank has it whole; it runs on the
// CPU.
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
    // Every buffer of a forward over n tokens, f32.
    struct Activations {
        Tensor residual, normed, token, fused; // [n, hs]
        Tensor q, q_token, attn_out;           // [n, nh * dh]
        Tensor k, k_token, v, v_token;         // [n, nkvh * dh]
        Tensor gate, up;                       // [n, di]
    };

    bool is(LlaisysDraftHeadKind kind) const { return meta_.kind == kind; }
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

    LlaisysDraftHeadMeta meta_; // what its decoder points to is not kept
    float scale_;               // of attention
    runtime::PackedWeight in_embed_, out_embed_, feature_, fuse_token_, fuse_hidden_;
    runtime::PackedWeight q_, k_, v_, q_token_, k_token_, v_token_, o_, gate_, up_, down_;
};

} // namespace llaisys::models
