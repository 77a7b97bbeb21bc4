#include "models/decoder/latent_attention.hpp"

#include "ops/head_linear/op.hpp"
#include "ops/kv_store/op.hpp"
#include "ops/norm/op.hpp"
#include "ops/rope/op.hpp"

namespace llaisys::models {

LatentAttention::LatentAttention(const LlaisysDecoderMeta &meta)
    : rank_(int64_t(meta.kv_rank)), q_rank_(int64_t(meta.q_rank)),
      rope_dim_(int64_t(meta.rope_dim)), heads_(int64_t(meta.nh)), head_dim_(int64_t(meta.dh)),
      value_dim_(int64_t(meta.v_dim)), hidden_(int64_t(meta.hs)), epsilon_(meta.latent_epsilon),
      layers_(meta.kv_rank > 0 ? meta.nlayer : 0) {}

void LatentAttention::register_slots(LlaisysDecoderWeights *weights, runtime::WeightTable *table,
                                     runtime::PackedWeights *packed) {
    weights_ = weights;
    runtime::LayerSlots<Layer> slots(table, packed, &layers_,
                                     std::vector<bool>(layers_.size(), true));
    if (q_rank_ > 0) {
        slots.add_linear("attn_q_a_w", &weights->attn_q_a_w, {q_rank_, hidden_}, &Layer::q_a);
        slots.add("attn_q_a_norm_w", &weights->attn_q_a_norm_w, {q_rank_});
    }
    slots.add_linear("attn_q_w", &weights->attn_q_w,
                     {heads_ * head_dim_, q_rank_ > 0 ? q_rank_ : hidden_}, &Layer::q);
    slots.add_linear("attn_kv_a_w", &weights->attn_kv_a_w, {rank_ + rope_dim_, hidden_},
                     &Layer::kv_a);
    slots.add("attn_kv_a_norm_w", &weights->attn_kv_a_norm_w, {rank_});
    slots.add_linear("attn_k_b_w", &weights->attn_k_b_w, {heads_ * rank_, head_dim_ - rope_dim_},
                     &Layer::k_b, nullptr, heads_);
    slots.add_linear("attn_v_b_w", &weights->attn_v_b_w, {heads_ * value_dim_, rank_}, &Layer::v_b,
                     nullptr, heads_);
}

LatentAttention::Buffers LatentAttention::allocate(runtime::Workspace &workspace, int64_t n,
                                                   DType dtype) const {
    Buffers buffers;
    if (!is_used()) {
        return buffers;
    }
    if (q_rank_ > 0) {
        buffers.q_a = workspace.allocate({n, q_rank_}, dtype);
    }
    buffers.q = workspace.allocate({n, heads_ * head_dim_}, dtype);
    buffers.entries = workspace.allocate({n, rank_ + rope_dim_}, dtype);
    buffers.queries = workspace.allocate({n, heads_, rank_ + rope_dim_}, dtype);
    buffers.latents = workspace.allocate({n, heads_, rank_}, dtype);
    return buffers;
}

void LatentAttention::project(const device::Stream &stream, size_t i, ops::Residual *residual,
                              const ops::Norm &norm, const ops::Placement &placement,
                              const Buffers &buffers) const {
    const Layer &layer = layers_[i];
    const int64_t n = buffers.q.size(0);
    const int64_t nope = head_dim_ - rope_dim_;
    ops::norm_rows(stream, norm.normed, ops::settle(stream, residual), norm);
    const ops::LinearPart down[] = {{q_rank_ > 0 ? &layer.q_a.weight : &layer.q.weight, nullptr,
                                     q_rank_ > 0 ? &buffers.q_a : &buffers.q},
                                    {&layer.kv_a.weight, nullptr, &buffers.entries}};
    ops::linear(stream, norm.normed, down, 2);
    if (q_rank_ > 0) {
        ops::rms_norm(stream, buffers.q_a, buffers.q_a, weights_->attn_q_a_norm_w[i]->tensor,
                      epsilon_);
        const ops::LinearPart up{&layer.q.weight, nullptr, &buffers.q};
        ops::linear(stream, buffers.q_a, &up, 1);
    }
    const Tensor latent = buffers.entries.slice(1, 0, rank_);
    ops::rms_norm(stream, latent, latent, weights_->attn_kv_a_norm_w[i]->tensor, epsilon_);
    const Tensor entries = buffers.entries.view({n, 1, rank_ + rope_dim_});
    const Tensor key = entries.slice(2, rank_, rank_ + rope_dim_);
    const Tensor heads = buffers.q.view({n, heads_, head_dim_});
    ops::rope(stream, key, key, placement.positions, placement.inv_freq, placement.rope_factor);
    ops::rope(stream, buffers.queries.slice(2, rank_, rank_ + rope_dim_),
              heads.slice(2, nope, head_dim_), placement.positions, placement.inv_freq,
              placement.rope_factor);
    ops::head_linear(stream, buffers.queries.slice(2, 0, rank_), heads.slice(2, 0, nope),
                     layer.k_b.experts);
    ops::kv_store(stream, placement.kv, entries, nullptr, placement.slots);
}

void LatentAttention::attend(const device::Stream &stream, size_t i, const Tensor &out,
                             const ops::KvLayer &kv, const ops::AttentionLists &lists, float scale,
                             const Buffers &buffers) const {
    ops::attention(stream, buffers.latents, buffers.queries, kv, lists, scale);
    ops::head_linear(stream, out, buffers.latents, layers_[i].v_b.experts);
}

} // namespace llaisys::models
