// Multi-head latent attention (DeepSeek-V2): keys and values of all heads are projections of one
// latent vector per token. The KV cache holds the normalised latent and the rotated key that all
// heads share, kv_rank + rope_dim values, and no keys and values of heads.
//
// The projection of the latent to keys is applied to the queries instead, and that to values to the
// result (absorption): scores are products of queries [kv_rank + rope_dim] with cache entries, and
// values are the first kv_rank of an entry. All query heads share one key/value head.
//
// Tensor parallelism: heads are sharded; the down-projections and the cache are replicated.
#pragma once

#include "models/model.hpp"
#include "ops/decoder_layer/op.hpp"
#include "runtime/weights/packed_weights.hpp"

#include "llaisys/models/decoder.h"

#include <vector>

namespace llaisys::models {

class LatentAttention {
public:
    // meta: of this rank.
    explicit LatentAttention(const LlaisysDecoderMeta &meta);

    bool is_used() const { return rank_ > 0; }

    // The objects must outlive this.
    void register_slots(LlaisysDecoderWeights *weights, runtime::WeightTable *table,
                        runtime::PackedWeights *packed);

    // Buffers of n tokens, of the activation dtype.
    struct Buffers {
        Tensor q_a;     // [n, q_rank]; only with q_rank
        Tensor q;       // [n, nh * dh]
        Tensor entries; // [n, kv_rank + rope_dim]: of the cache
        Tensor queries; // [n, nh, kv_rank + rope_dim]
        Tensor latents; // [n, nh, kv_rank]: result of attention
    };
    Buffers allocate(runtime::Workspace &workspace, int64_t n, DType dtype) const;

    // Computes the queries, and stores the cache entries, of norm(residual).
    void project(const device::Stream &stream, size_t layer, ops::Residual *residual,
                 const ops::Norm &norm, const ops::Placement &placement,
                 const Buffers &buffers) const;
    // out [n, nh, v_dim]
    void attend(const device::Stream &stream, size_t layer, const Tensor &out,
                const ops::KvLayer &kv, const ops::AttentionLists &lists, float scale,
                const Buffers &buffers) const;

private:
    struct Layer {
        runtime::PackedWeight q_a, q, kv_a, k_b, v_b;
    };

    int64_t rank_;   // kv_rank; 0: not used
    int64_t q_rank_; // 0: queries are one product
    int64_t rope_dim_;
    int64_t heads_;    // of this rank
    int64_t head_dim_; // of a query before absorption
    int64_t value_dim_;
    int64_t hidden_;
    float epsilon_;
    std::vector<Layer> layers_;
    const LlaisysDecoderWeights *weights_ = nullptr;
};

} // namespace llaisys::models
