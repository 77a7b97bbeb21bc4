#include "models/decoder/latent_attention.hpp"

#include "ops/head_linear/op.hpp"
#include "ops/kv_store/op.hpp"
#include "ops/rms_norm/op.hpp"
#include "ops/rope/op.hpp"

#include <cmath>

namespace llaisys::models {

void check_latent(const LlaisysDecoderMeta &meta) {
    if (meta.kv_rank == 0) {
        return;
    }
    constexpr size_t kMostRank = 1 << 16;
    const auto check = [](const char *name, size_t value, size_t limit) {
        require(value >= 1 && value <= limit, "meta.", name, " must be in [1, ", limit, "], got ",
                value);
    };
    check("kv_rank", meta.kv_rank, 1024);
    check("rope_dim", meta.rope_dim, meta.dh - 1);
    check("v_dim", meta.v_dim, 1024);
    require(meta.rope_dim % 2 == 0, "meta.rope_dim must be even, got ", meta.rope_dim);
    require(meta.q_rank <= kMostRank, "meta.q_rank must be at most ", kMostRank, ", got ",
            meta.q_rank);
    require(std::isfinite(meta.latent_epsilon) && meta.latent_epsilon > 0,
            "meta.latent_epsilon must be finite and above 0, got ", meta.latent_epsilon);
    require(meta.nkvh == 1, "meta.nkvh must be 1 with meta.kv_rank, got ", meta.nkvh);
    require(meta.layer_inv_freqs == nullptr && meta.has_row_norms == 0 &&
                meta.attention_soft_cap == 0 && meta.has_sinks == 0,
            "meta.kv_rank does not support layer_inv_freqs, has_row_norms, attention_soft_cap and "
            "has_sinks");
}

LatentAttention::LatentAttention(const LlaisysDecoderMeta &meta)
    : rank_(int64_t(meta.kv_rank)), q_rank_(int64_t(meta.q_rank)),
      rope_dim_(int64_t(meta.rope_dim)), heads_(int64_t(meta.nh)), head_dim_(int64_t(meta.dh)),
      value_dim_(int64_t(meta.v_dim)), hidden_(int64_t(meta.hs)), epsilon_(meta.latent_epsilon),
      layers_(meta.kv_rank > 0 ? meta.nlayer : 0) {}

void LatentAttention::register_slots(LlaisysDecoderWeights *weights, runtime::WeightTable *table,
                                     runtime::PackedWeights *packed) {
    weights_ = weights;
    const auto add = [&](const char *name, llaisysTensor_t **slots, const Shape &shape) {
        *slots = table->add_layers(name, int(layers_.size()), shape);
    };
    // n_heads 0: one weight; otherwise one per head.
    const auto add_linear = [&](const char *name, llaisysTensor_t **slots, const Shape &shape,
                                runtime::PackedWeight Layer::*to, int64_t n_heads = 0) {
        add(name, slots, shape);
        for (size_t i = 0; i < layers_.size(); ++i) {
            if (n_heads > 0) {
                packed->add_experts(*slots + i, &(layers_[i].*to), n_heads);
            } else {
                packed->add(*slots + i, &(layers_[i].*to));
            }
        }
    };
    if (q_rank_ > 0) {
        add_linear("attn_q_a_w", &weights->attn_q_a_w, {q_rank_, hidden_}, &Layer::q_a);
        add("attn_q_a_norm_w", &weights->attn_q_a_norm_w, {q_rank_});
    }
    add_linear("attn_q_w", &weights->attn_q_w,
               {heads_ * head_dim_, q_rank_ > 0 ? q_rank_ : hidden_}, &Layer::q);
    add_linear("attn_kv_a_w", &weights->attn_kv_a_w, {rank_ + rope_dim_, hidden_}, &Layer::kv_a);
    add("attn_kv_a_norm_w", &weights->attn_kv_a_norm_w, {rank_});
    add_linear("attn_k_b_w", &weights->attn_k_b_w, {heads_ * rank_, head_dim_ - rope_dim_},
               &Layer::k_b, heads_);
    add_linear("attn_v_b_w", &weights->attn_v_b_w, {heads_ * value_dim_, rank_}, &Layer::v_b,
               heads_);
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
