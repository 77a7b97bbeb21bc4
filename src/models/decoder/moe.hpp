// The mixture-of-experts MLP of decoder layers: router, routed experts, shared experts.
//
// Tensor parallelism: gate and up of every expert are sharded by output, down by input; the router
// is replicated. One AllReduce per layer.
#pragma once

#include "models/decoder/block_output.hpp"
#include "ops/moe/op.hpp"
#include "runtime/weights/packed_weights.hpp"
#include "runtime/workspace/workspace.hpp"

#include "llaisys/models/decoder.h"

#include <vector>

namespace llaisys::models {

class MoeLayers {
public:
    // meta: of this rank; meta.moe_layers may be null. weights must outlive this.
    MoeLayers(const LlaisysDecoderMeta &meta, const LlaisysDecoderWeights &weights,
              std::shared_ptr<const parallel::ProcessGroup> group);

    bool has(size_t layer) const { return is_moe_[layer]; }
    bool has_any() const { return meta_.n_experts > 0; }
    // Layers with a dense MLP.
    std::vector<bool> dense() const;

    // The objects must outlive this.
    void register_slots(LlaisysDecoderWeights *weights, runtime::WeightTable *table,
                        runtime::PackedWeights *packed);

    // Buffers of n tokens, of the activation dtype unless noted.
    struct Buffers {
        Tensor logits;  // f32 [n, E]
        Tensor experts; // i32 [n, k]
        Tensor weights; // f32 [n, k]
        Tensor gate;    // [n * k, di]
        Tensor up;      // [n * k, di]; CPU
        Tensor out;     // [n * k, hs]
        Tensor sorted;  // i32 [moe_sorted_size()]; not CPU
        Tensor sum;     // [n, hs]
        // With shared experts:
        Tensor shared_gate;  // [n, shared_di]
        Tensor shared_up;    // [n, shared_di]
        Tensor shared_out;   // [n, hs]
        Tensor shared_scale; // f32 [n, 1]

        // The buffers of the first n tokens, of k experts each.
        Buffers first(int64_t n, int64_t k) const;
    };
    Buffers allocate(runtime::Workspace &workspace, int64_t n, DType dtype, bool is_cpu) const;

    // residual += MLP of norm(residual), as output does.
    void run(const device::Stream &stream, size_t layer, const ops::Norm &norm,
             const Buffers &buffers, const BlockOutput &output, const PostNorm &post_norm,
             ops::Residual *residual) const;

private:
    struct Layer {
        runtime::PackedWeight router, gate, up, down;
        runtime::PackedWeight shared_gate, shared_up, shared_down, shared_scale;
    };

    ops::MoeRouting routing() const;
    // Calls use(ops::ExpertMlp) with the experts of a layer.
    template <typename Use> void use_experts(size_t layer, const Use &use) const;
    // The whole of run() without shared experts for one token; writes norm.normed if they need it.
    // False where the device has no kernel; nothing is written then.
    bool run_token(const device::Stream &stream, size_t layer, const ops::Norm &norm,
                   ops::Residual *residual) const;
    // Writes norm.normed, and experts and weights of the buffers.
    void route(const device::Stream &stream, size_t layer, const ops::Norm &norm,
               const Buffers &buffers, ops::Residual *residual) const;
    void run_experts(const device::Stream &stream, size_t layer, const Tensor &normed,
                     const Buffers &buffers, const Tensor &out, bool adds) const;
    // shared_gate = the hidden values of the shared experts.
    void run_shared_input(const device::Stream &stream, const Layer &layer, const Tensor &normed,
                          const Buffers &buffers) const;

    LlaisysDecoderMeta meta_; // sizes of this rank
    std::shared_ptr<const parallel::ProcessGroup> group_;
    std::vector<bool> is_moe_; // by layer
    std::vector<Layer> layers_;
    const LlaisysDecoderWeights &weights_;
};

} // namespace llaisys::models
