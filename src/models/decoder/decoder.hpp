// The decoder that Qwen2, Llama, Qwen3 and others share: they differ in which weights exist (Qwen2 has q/k/v
// biases, Qwen3 norms of q and k) and in the rotary frequencies and windows, all of which come with
// the weights and the meta.
//
// Ranks of a group hold the same embeddings and norms, and each its own heads and its own part of
// the inner size: q, k, v, gate and up are cut by rows (outputs), o and down by columns (inputs).
// What o and down give is a rank's part of a sum; the two sums a layer are the only talk between
// ranks, and all ranks end with the same logits. A head that is cut by the vocabulary adds one
// gathering of logits a step.
#pragma once

#include "models/slot_model.hpp"
#include "ops/decoder_layer/op.hpp"

#include "llaisys/models/decoder.h"

#include <vector>

namespace llaisys::models {

// What a type of decoder demands beyond what all of them have.
struct DecoderKind {
    LlaisysModelType type;
    bool needs_head_norms = false; // those of q and k; otherwise they are used where they are set
};

class DecoderModel final : public SlotModel<LlaisysDecoderWeights> {
public:
    DecoderModel(const DecoderKind &kind, const LlaisysDecoderMeta &meta, const ModelSite &site);

    int64_t kept_hidden() const override { return int64_t(kept_.size() * meta_.hs); }
    void keep_hidden(const std::vector<int32_t> &layers) override;
    int64_t workspace_bytes(int64_t n_tokens, int64_t n_outputs) const override;
    void forward(const device::Stream &stream, runtime::Workspace &workspace,
                 const ModelInput &input, const AttentionMetadata &attention,
                 ForwardOutput *output) override;

private:
    // Every buffer of a forward over n tokens; of activation_dtype() but the first.
    struct Activations {
        Tensor residual; // f32 [n, hs], the sum of ops::Residual
        Tensor normed;   // [n, hs]: input of the next product, or its output before the sum
        Tensor q;        // [n, nh * dh]
        Tensor k;        // [n, nkvh * dh]
        Tensor v;        // [n, nkvh * dh]
        Tensor attn_out; // [n, nh, dh]
        Tensor gate;     // [n, di]
        Tensor up;       // [n, di]
        // Of a head that is cut: at most kHeadRows rows of logits at a time, f32.
        Tensor own_logits; // [rows, head_columns_]
        Tensor all_logits; // [ranks, rows, head_columns_]
        Tensor kept;       // f32 [n, hs]; not defined when no hidden states are kept
        // Of the tokens that the last layer goes on with; kLastRows rows at most.
        Tensor last_residual; // f32 [rows, hs]
        Tensor last_attn_out; // [rows, nh, dh]
    };
    static constexpr int64_t kHeadRows = 32;
    static constexpr int64_t kLastRows = 512;

    struct Layer {
        runtime::PackedWeight q, k, v, o, gate, up, down;
        runtime::WeightRoom qkv, gate_up;
    };

    void register_slots(const DecoderKind &kind);
    Activations take_activations(runtime::Workspace &workspace, int64_t n_tokens,
                                 int64_t n_outputs) const;
    void run_layers(const device::Stream &stream, const ModelInput &input,
                    const AttentionMetadata &attention, const Activations &act,
                    ForwardOutput *output) const;
    // Copies what the residual stream is into the places of `layer` in `hidden`.
    void keep(const device::Stream &stream, int32_t layer, const Activations &act,
              const ops::Residual &residual, const Tensor &hidden) const;
    void embed(const device::Stream &stream, const ModelInput &input, const Tensor &out) const;
    DType activation_dtype() const;
    ops::Norm norm(llaisysTensor_t weight, const Activations &act) const;
    // Queries, and keys and values into the cache.
    void project(const device::Stream &stream, size_t index, const ModelInput &input,
                 const AttentionMetadata &attention, const Activations &act,
                 ops::Residual *residual) const;
    // Whether the last layer goes on with few rows, and the activations of these: what they were.
    bool narrows(const ModelInput &input) const;
    Activations narrow(const device::Stream &stream, const ModelInput &input,
                       const Activations &act, ops::Residual *residual) const;
    // From the output of attention on: o, then the inner layer.
    void feed_forward(const device::Stream &stream, size_t index, const Activations &act,
                      ops::Residual *residual) const;
    // The logits of rows (i32) of the residual stream: of a head that is cut, each rank's columns, gathered.
    void run_head(const device::Stream &stream, const Tensor &rows, const Activations &act,
                  ops::Residual *residual, const Tensor &logits) const;
    // residual += in * weight^T + bias, summed over the ranks. The product is put into scratch.
    void add_product(const device::Stream &stream, ops::Residual *residual, const Tensor &in,
                     const ops::LinearWeight &weight, const Tensor *bias,
                     const Tensor &scratch) const;

    std::shared_ptr<const parallel::ProcessGroup> group_;
    LlaisysDecoderMeta meta_;   // nh, nkvh and di: this rank's share; what it points to is not kept
    float scale_;               // of attention
    std::vector<int32_t> kept_; // layers whose hidden states are kept; -1: after the last norm
    std::vector<Layer> layers_;
    runtime::PackedWeight head_;
    runtime::PackedWeight in_embed_; // not defined where in_embed is read as a tensor
    int64_t head_columns_ = 0; // of the vocabulary, on every rank but the last; 0: it is not cut
};

} // namespace llaisys::models
