#include "models/decoder/mlp.hpp"

#include "models/hyper_params.hpp"

namespace llaisys::models {

using runtime::tensor_at;

Mlp::Mlp(const LlaisysDecoderMeta &meta, const LlaisysDecoderWeights &weights,
         const LoraSlots &lora, const BlockOutput &output,
         std::shared_ptr<const parallel::ProcessGroup> group)
    : meta_(without_pointers(meta)), weights_(weights), lora_(lora), output_(output),
      layers_(meta.nlayer), moe_(meta, weights, std::move(group)) {}

void Mlp::register_slots(LlaisysDecoderWeights *weights, runtime::WeightTable *table,
                         runtime::PackedWeights *packed) {
    const int64_t hidden = int64_t(meta_.hs);
    const int64_t inner = int64_t(meta_.di);
    runtime::LayerSlots<Layer> dense(table, packed, &layers_, moe_.dense());
    if (has_gate()) {
        dense.add_linear("mlp_gate_w", &weights->mlp_gate_w, {inner, hidden}, &Layer::gate,
                         &Layer::gate_up);
    }
    dense.add_linear("mlp_up_w", &weights->mlp_up_w, {inner, hidden}, &Layer::up, &Layer::gate_up);
    dense.add_linear("mlp_down_w", &weights->mlp_down_w, {hidden, inner}, &Layer::down);
    runtime::LayerSlots<Layer> all(table, packed, &layers_,
                                   std::vector<bool>(layers_.size(), true));
    all.add("mlp_up_b", &weights->mlp_up_b, {inner}, true);
    all.add("mlp_down_b", &weights->mlp_down_b, {hidden}, true);
    moe_.register_slots(weights, table, packed);
}

Mlp::Buffers Mlp::allocate(runtime::Workspace &workspace, int64_t n, DType dtype,
                           bool is_cpu) const {
    const int64_t inner = int64_t(meta_.di);
    Buffers buffers;
    buffers.moe = moe_.allocate(workspace, n, dtype, is_cpu);
    if (is_cpu) {
        buffers.gate = workspace.allocate({n, inner}, dtype);
        buffers.up = workspace.allocate({n, inner}, dtype);
        return buffers;
    }
    // Adjacent columns, as in the fused weights: one product.
    const Tensor gate_up = workspace.allocate({n, 2 * inner}, dtype);
    if (gate_up.defined()) { // not while measuring
        buffers.gate = gate_up.slice(1, 0, inner);
        buffers.up = gate_up.slice(1, inner, 2 * inner);
    }
    return buffers;
}

Mlp::Buffers Mlp::first(const Buffers &buffers, int64_t n) const {
    return {buffers.gate.slice(0, 0, n), buffers.up.slice(0, 0, n),
            buffers.moe.first(n, int64_t(meta_.n_experts_used))};
}

void Mlp::run(const device::Stream &stream, size_t i, const ops::Norm &norm, const Buffers &buffers,
              const LoraInput &lora, ops::Residual *residual) const {
    if (has_experts(i)) {
        return moe_.run(stream, i, norm, buffers.moe, output_, post_norm(i), residual);
    }
    compute_input(stream, i, norm, buffers, lora, residual);
    add_output(stream, i, norm.normed, buffers, lora, residual);
}

void Mlp::compute_input(const device::Stream &stream, size_t i, const ops::Norm &norm,
                        const Buffers &buffers, const LoraInput &lora,
                        ops::Residual *residual) const {
    const Layer &layer = layers_[i];
    const Tensor *up_bias = tensor_at(weights_.mlp_up_b, i);
    const auto activation = meta_.mlp_kind == LLAISYS_MLP_SWIGLU     ? ops::Activation::silu
                            : meta_.mlp_kind == LLAISYS_MLP_GELU_ERF ? ops::Activation::gelu_erf
                                                                     : ops::Activation::gelu_tanh;
    if (!has_gate()) {
        return ops::mlp_input(stream, residual, norm, {&layer.up.weight, up_bias, &buffers.gate},
                              {nullptr, nullptr, nullptr}, activation,
                              lora_.product(i, {LoraTarget::up}, lora));
    }
    ops::Lora adapters = lora_.product(i, {LoraTarget::gate, LoraTarget::up}, lora);
    if (lora.rows != nullptr && meta_.is_parallel == 0 && post_norm(i).weight == nullptr &&
        output_.is_plain(post_norm(i))) {
        adapters.next = &lora_.weight(i, LoraTarget::down); // add_product() adds it as it is
    }
    ops::mlp_input(stream, residual, norm, {&layer.gate.weight, nullptr, &buffers.gate},
                   {&layer.up.weight, up_bias, &buffers.up}, activation, adapters);
}

void Mlp::add_output(const device::Stream &stream, size_t i, const Tensor &scratch,
                     const Buffers &buffers, const LoraInput &lora, ops::Residual *residual) const {
    output_.add_product(stream, residual, buffers.gate, layers_[i].down.weight,
                        tensor_at(weights_.mlp_down_b, i), post_norm(i), scratch,
                        lora_.product(i, {LoraTarget::down}, lora));
}

} // namespace llaisys::models
