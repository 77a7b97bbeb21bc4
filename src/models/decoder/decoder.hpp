// The decoder of Qwen2, Llama, Qwen3, Gemma and other families. They differ in optional weights
// (q/k/v biases of Qwen2, q and k norms of Qwen3), norms, multipliers, rotary frequencies and
// attention windows, which come with the weights and the meta.
// Attention is that of Llama, or latent attention (latent_attention.hpp).
//
// Tensor parallelism: every rank holds all embeddings and norms. q, k, v, gate and up are
// column-parallel (sharded by output), o and down row-parallel (sharded by input), each followed by
// an AllReduce. All ranks end with the same logits. A vocabulary-parallel head adds one AllGather
// of logits per step.
//
// Pipeline parallelism: a stage holds meta.nlayer adjacent layers, the first stage also the
// embeddings, the last one the last norm and the head. A stage receives the residual stream of a
// micro-batch from the stage before it and sends it to the next one. Only the last stage writes
// outputs.
#pragma once

#include "models/decoder/latent_attention.hpp"
#include "models/decoder/mlp.hpp"
#include "models/slot_model.hpp"

#include "llaisys/models/decoder.h"

#include <vector>

namespace llaisys::models {

class DecoderModel final : public SlotModel<LlaisysDecoderWeights> {
public:
    // QWEN3 requires the norms of q and k; other types differ in nothing.
    DecoderModel(LlaisysModelType type, const LlaisysDecoderMeta &meta,
                 const ModelPlacement &placement);

    int64_t aux_hidden_size() const override {
        return int64_t(aux_hidden_layers_.size() * meta_.hs);
    }
    void set_aux_hidden_layers(const std::vector<int32_t> &layers) override;
    int64_t lora_slots() const override { return lora_.n_slots(); }
    const int32_t *lora_ranks() const override { return lora_.ranks(); }
    int64_t lora_bytes(int64_t n_slots, int64_t max_rank) const override;
    void reserve_lora(const device::Stream *stream, int64_t n_slots, int64_t max_rank) override;
    void set_lora(const device::Stream &stream, int64_t slot, const char *field, int64_t layer,
                  const Tensor &a, const Tensor &b, float scale) override;
    void clear_lora(const device::Stream &stream, int64_t slot) override {
        lora_.clear(stream, slot);
    }
    int64_t workspace_bytes(int64_t n_tokens, int64_t n_outputs) const override;
    void forward(const device::Stream &stream, runtime::Workspace &workspace,
                 const ModelInput &input, const AttentionMetadata &attention,
                 ForwardOutput *output) override;

private:
    // Buffers of a forward over n tokens, of the activation dtype unless noted.
    struct Activations {
        Tensor residual; // f32 [n, hs], the sum of ops::Residual
        Tensor normed;   // [n, hs]: input of the next product, or its output before the AllReduce
        Tensor q;        // [n, nh * dh]
        Tensor k;        // [n, nkvh * dh]
        Tensor v;        // [n, nkvh * dh]
        Tensor attn_out; // [n, nh, dh or v_dim]
        // Vocabulary-parallel head: at most kHeadRows rows of logits at a time, f32.
        Tensor own_logits; // [rows, head_columns_]
        Tensor all_logits; // [ranks, rows, head_columns_]
        Tensor aux_hidden; // f32 [n, hs]; only with aux_hidden_layers_
        // Rows selected by select_output_rows, at most kLastRows.
        Tensor last_residual; // f32 [rows, hs]
        Tensor last_attn_out; // [rows, nh, dh or v_dim]
        Mlp::Buffers mlp;
        LatentAttention::Buffers latent; // instead of q, k and v
        LoraInput lora;
        Tensor embedded; // f32 [n, hs]: rows of pos_embed or type_embed
    };
    static constexpr int64_t kHeadRows = 32;
    static constexpr int64_t kLastRows = 512;

    struct Layer {
        runtime::PackedWeight q, k, v, o;
        ops::LinearBuffer qkv;
    };

    void register_slots();
    Activations allocate_activations(runtime::Workspace &workspace, int64_t n_tokens,
                                     int64_t n_outputs) const;
    void run_layers(const device::Stream &stream, const ModelInput &input,
                    const AttentionMetadata &attention, const Activations &act,
                    ForwardOutput *output) const;
    // Copies the residual stream at `layer` into its columns of `hidden`.
    void store_aux_hidden(const device::Stream &stream, int32_t layer, const Activations &act,
                          const ops::Residual &residual, const Tensor &hidden) const;
    void embed(const device::Stream &stream, const ModelInput &input, const Activations &act) const;
    ops::Norm out_norm(const Activations &act) const;
    // Norm of layer `index` before attention, or before the MLP. Without one: NormKind::none.
    ops::Norm attn_norm(size_t index, const Activations &act) const;
    ops::Norm mlp_norm(size_t index, const Activations &act) const;
    int64_t value_dim() const { return int64_t(latent_.is_used() ? meta_.v_dim : meta_.dh); }
    LoraShapes lora_shapes() const;
    // Computes queries, and stores keys and values in the cache.
    void project(const device::Stream &stream, size_t index, const ModelInput &input,
                 const AttentionMetadata &attention, const Activations &act,
                 ops::Residual *residual) const;
    void attend(const device::Stream &stream, size_t index, const AttentionMetadata &attention,
                const Activations &act) const;
    // Whether the last layer computes only output rows after its keys and values are stored; the
    // activations of those rows.
    bool selects_output_rows(const ModelInput &input) const;
    Activations select_output_rows(const device::Stream &stream, const ModelInput &input,
                                   const Activations &act, ops::Residual *residual) const;
    // The output projection of attention, then the MLP.
    void feed_forward(const device::Stream &stream, size_t index, const Activations &act,
                      ops::Residual *residual) const;
    // Logits of rows (i32) of the residual stream; gathers the ranks' columns of a
    // vocabulary-parallel head.
    void run_head(const device::Stream &stream, const Tensor &rows, const Activations &act,
                  ops::Residual *residual, const Tensor &logits) const;

    std::shared_ptr<const parallel::ProcessGroup> group_;
    std::shared_ptr<const parallel::ProcessGroup> stages_; // null: one stage
    bool is_first_stage_, is_last_stage_;
    LlaisysDecoderMeta meta_;                // nh, nkvh and di of this rank; its pointers are null
    float scale_;                            // of attention
    std::vector<int32_t> aux_hidden_layers_; // -1: after the last norm
    std::vector<Layer> layers_;
    LatentAttention latent_;
    std::vector<Tensor> inv_freqs_; // of each layer
    LoraSlots lora_;
    BlockOutput output_;
    Mlp mlp_;
    runtime::PackedWeight head_;
    runtime::PackedWeight in_embed_; // without storage: in_embed is read as a tensor
    int64_t head_columns_ = 0; // vocabulary rows per rank (the last may have fewer); 0: not sharded
};

} // namespace llaisys::models
