// The MLP of decoder layers: dense, or with experts (moe.hpp).
//
// Tensor parallelism: gate and up are sharded by output, down by input. One AllReduce per layer.
#pragma once

#include "models/decoder/block_output.hpp"
#include "models/decoder/lora_slots.hpp"
#include "models/decoder/moe.hpp"

namespace llaisys::models {

class Mlp {
public:
    // meta: of this rank; meta.moe_layers may be null. The references must outlive this.
    Mlp(const LlaisysDecoderMeta &meta, const LlaisysDecoderWeights &weights, const LoraSlots &lora,
        const BlockOutput &output, std::shared_ptr<const parallel::ProcessGroup> group);

    bool has_experts(size_t layer) const { return moe_.has(layer); }
    bool has_gate() const { return meta_.mlp_kind < LLAISYS_MLP_GELU; }

    // The objects must outlive this.
    void register_slots(LlaisysDecoderWeights *weights, runtime::WeightTable *table,
                        runtime::PackedWeights *packed);

    // Buffers of n tokens, of the activation dtype.
    struct Buffers {
        Tensor gate; // [n, di]
        Tensor up;   // [n, di]
        MoeLayers::Buffers moe;
    };
    Buffers allocate(runtime::Workspace &workspace, int64_t n, DType dtype, bool is_cpu) const;
    // The buffers of the first n tokens.
    Buffers first(const Buffers &buffers, int64_t n) const;

    // residual += MLP of norm(residual); norm.normed is scratch.
    void run(const device::Stream &stream, size_t layer, const ops::Norm &norm,
             const Buffers &buffers, const LoraInput &lora, ops::Residual *residual) const;
    // The halves of run() for a dense layer whose attention reads the same residual stream: the
    // output of attention is added between them.
    void compute_input(const device::Stream &stream, size_t layer, const ops::Norm &norm,
                       const Buffers &buffers, const LoraInput &lora,
                       ops::Residual *residual) const;
    void add_output(const device::Stream &stream, size_t layer, const Tensor &scratch,
                    const Buffers &buffers, const LoraInput &lora, ops::Residual *residual) const;

private:
    struct Layer {
        runtime::PackedWeight gate, up, down;
        ops::LinearBuffer gate_up;
    };

    PostNorm post_norm(size_t layer) const {
        return {weights_.mlp_post_norm_w[layer], weights_.mlp_post_norm_b[layer]};
    }

    LlaisysDecoderMeta meta_; // its pointers are null
    const LlaisysDecoderWeights &weights_;
    const LoraSlots &lora_;
    const BlockOutput &output_;
    std::vector<Layer> layers_;
    MoeLayers moe_;
};

} // namespace llaisys::models
