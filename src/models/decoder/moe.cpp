#include "models/decoder/moe.hpp"

#include "ops/elementwise/op.hpp"
#include "ops/glu/op.hpp"

namespace llaisys::models {

using runtime::tensor_at;

namespace {

// A stacked bias [count * out] as [count, out].
Tensor stacked(const Tensor *bias, int64_t count) {
    return bias != nullptr ? bias->view({count, bias->size(0) / count}) : Tensor();
}

const Tensor *or_null(const Tensor &tensor) { return tensor.defined() ? &tensor : nullptr; }

} // namespace

MoeLayers::MoeLayers(const LlaisysDecoderMeta &meta, const LlaisysDecoderWeights &weights,
                     std::shared_ptr<const parallel::ProcessGroup> group)
    : meta_(meta), group_(std::move(group)), is_moe_(meta.nlayer, meta.n_experts > 0),
      weights_(weights) {
    for (size_t i = 0; meta.moe_layers != nullptr && i < meta.nlayer; ++i) {
        is_moe_[i] = meta.n_experts > 0 && meta.moe_layers[i] != 0;
    }
    meta_.moe_layers = nullptr; // belongs to the caller
    if (meta.n_experts > 0) {
        layers_.resize(meta.nlayer);
    }
}

std::vector<bool> MoeLayers::dense() const {
    std::vector<bool> layers = is_moe_;
    layers.flip();
    return layers;
}

void MoeLayers::register_slots(LlaisysDecoderWeights *weights, runtime::WeightTable *table,
                               runtime::PackedWeights *packed) {
    if (!has_any()) {
        return;
    }
    const int64_t hidden = int64_t(meta_.hs);
    const int64_t count = int64_t(meta_.n_experts);
    const int64_t inner = int64_t(meta_.moe_di);
    const int64_t shared = int64_t(meta_.shared_di);
    runtime::LayerSlots<Layer> slots(table, packed, &layers_, is_moe_);
    slots.add_linear("moe_router_w", &weights->moe_router_w, {count, hidden}, &Layer::router);
    if (meta_.moe_has_score_bias != 0) {
        slots.add("moe_score_b", &weights->moe_score_b, {count});
    }
    slots.add_linear("moe_gate_w", &weights->moe_gate_w, {count * inner, hidden}, &Layer::gate,
                     nullptr, count);
    slots.add_linear("moe_up_w", &weights->moe_up_w, {count * inner, hidden}, &Layer::up, nullptr,
                     count);
    slots.add_linear("moe_down_w", &weights->moe_down_w, {count * hidden, inner}, &Layer::down,
                     nullptr, count);
    if (meta_.moe_has_bias != 0) {
        slots.add("moe_router_b", &weights->moe_router_b, {count});
        slots.add("moe_gate_b", &weights->moe_gate_b, {count * inner});
        slots.add("moe_up_b", &weights->moe_up_b, {count * inner});
        slots.add("moe_down_b", &weights->moe_down_b, {count * hidden});
    }
    if (shared > 0) {
        slots.add_linear("shared_gate_w", &weights->shared_gate_w, {shared, hidden},
                         &Layer::shared_gate);
        slots.add_linear("shared_up_w", &weights->shared_up_w, {shared, hidden}, &Layer::shared_up);
        slots.add_linear("shared_down_w", &weights->shared_down_w, {hidden, shared},
                         &Layer::shared_down);
    }
    if (meta_.moe_has_shared_gate != 0) {
        slots.add_linear("shared_scale_w", &weights->shared_scale_w, {1, hidden},
                         &Layer::shared_scale);
    }
}

MoeLayers::Buffers MoeLayers::allocate(runtime::Workspace &workspace, int64_t n, DType dtype,
                                       bool is_cpu) const {
    Buffers buffers;
    if (!has_any()) {
        return buffers;
    }
    const int64_t count = int64_t(meta_.n_experts);
    const int64_t k = int64_t(meta_.n_experts_used);
    const int64_t hidden = int64_t(meta_.hs);
    const int64_t inner = int64_t(meta_.moe_di);
    const int64_t shared = int64_t(meta_.shared_di);
    buffers.logits = workspace.allocate({n, count}, LLAISYS_DTYPE_F32);
    buffers.experts = workspace.allocate({n, k}, LLAISYS_DTYPE_I32);
    buffers.weights = workspace.allocate({n, k}, LLAISYS_DTYPE_F32);
    buffers.gate = workspace.allocate({n * k, inner}, dtype);
    buffers.out = workspace.allocate({n * k, hidden}, dtype);
    buffers.sum = workspace.allocate({n, hidden}, dtype);
    if (is_cpu) {
        buffers.up = workspace.allocate({n * k, inner}, dtype);
    } else {
        buffers.sorted =
            workspace.allocate({ops::moe_sorted_size(n * k, count)}, LLAISYS_DTYPE_I32);
    }
    if (shared > 0) {
        buffers.shared_gate = workspace.allocate({n, shared}, dtype);
        buffers.shared_up = workspace.allocate({n, shared}, dtype);
        buffers.shared_out = workspace.allocate({n, hidden}, dtype);
        buffers.shared_scale = workspace.allocate({n, 1}, LLAISYS_DTYPE_F32);
    }
    return buffers;
}

MoeLayers::Buffers MoeLayers::Buffers::first(int64_t n, int64_t k) const {
    const auto rows = [](const Tensor &tensor, int64_t count) {
        return tensor.defined() ? tensor.slice(0, 0, count) : tensor;
    };
    Buffers part;
    part.logits = rows(logits, n);
    part.experts = rows(experts, n);
    part.weights = rows(weights, n);
    part.gate = rows(gate, n * k);
    part.up = rows(up, n * k);
    part.out = rows(out, n * k);
    part.sum = rows(sum, n);
    part.shared_gate = rows(shared_gate, n);
    part.shared_up = rows(shared_up, n);
    part.shared_out = rows(shared_out, n);
    part.shared_scale = rows(shared_scale, n);
    if (sorted.defined()) {
        part.sorted = rows(sorted, ops::moe_sorted_size(n * k, logits.size(1)));
    }
    return part;
}

void MoeLayers::run(const device::Stream &stream, size_t layer, const ops::Norm &norm,
                    const Buffers &buffers, const BlockOutput &output, const PostNorm &post_norm,
                    ops::Residual *residual) const {
    const Layer &weights = layers_[layer];
    const Tensor &normed = norm.normed;
    const bool has_shared = meta_.shared_di > 0;
    const bool adds = stream.type() != LLAISYS_DEVICE_CPU && output.is_plain(post_norm);
    const bool is_added = adds && run_token(stream, layer, norm, residual);
    if (!is_added) {
        route(stream, layer, norm, buffers, residual);
    }
    if (has_shared) {
        run_shared_input(stream, weights, normed, buffers);
    }
    if (adds) {
        if (!is_added) {
            run_experts(stream, layer, normed, buffers, residual->sum, true);
        }
        if (has_shared) {
            ops::linear_add(stream, residual->sum, buffers.shared_gate, weights.shared_down.weight,
                            nullptr);
        }
        return output.finish(stream, residual, post_norm);
    }
    run_experts(stream, layer, normed, buffers, buffers.sum, false);
    if (has_shared) {
        const ops::LinearPart part{&weights.shared_down.weight, nullptr, &buffers.shared_out};
        ops::linear(stream, buffers.shared_gate, &part, 1);
        ops::add(stream, buffers.sum, buffers.sum, buffers.shared_out);
    }
    output.add(stream, residual, buffers.sum, post_norm);
}

ops::MoeRouting MoeLayers::routing() const {
    ops::MoeRouting routing;
    routing.is_sigmoid = meta_.moe_is_sigmoid != 0;
    routing.is_renormalised = meta_.moe_is_renormalised != 0;
    routing.n_groups = meta_.moe_groups != 0 ? meta_.moe_groups : 1;
    routing.n_top_groups = meta_.moe_top_groups != 0 ? meta_.moe_top_groups : routing.n_groups;
    routing.scale = meta_.moe_scale != 0 ? meta_.moe_scale : 1.0f;
    return routing;
}

template <typename Use> void MoeLayers::use_experts(size_t layer, const Use &use) const {
    const Layer &weights = layers_[layer];
    const int64_t count = int64_t(meta_.n_experts);
    const Tensor gate_bias = stacked(tensor_at(weights_.moe_gate_b, layer), count);
    const Tensor up_bias = stacked(tensor_at(weights_.moe_up_b, layer), count);
    const Tensor down_bias = group_->rank() == 0 // added once
                                 ? stacked(tensor_at(weights_.moe_down_b, layer), count)
                                 : Tensor();
    use(ops::ExpertMlp{&weights.gate.experts, &weights.up.experts, &weights.down.experts,
                       or_null(gate_bias), or_null(up_bias), or_null(down_bias), meta_.moe_limit,
                       meta_.moe_alpha});
}

bool MoeLayers::run_token(const device::Stream &stream, size_t layer, const ops::Norm &norm,
                          ops::Residual *residual) const {
    if (norm.kind != ops::NormKind::rms) {
        return false;
    }
    const ops::RouterInput input{ops::settle(stream, residual),
                                 norm.weight,
                                 norm.epsilon,
                                 norm.normed,
                                 &layers_[layer].router.weight,
                                 tensor_at(weights_.moe_router_b, layer),
                                 meta_.shared_di > 0};
    bool is_done = false;
    use_experts(layer, [&](const ops::ExpertMlp &mlp) {
        is_done = ops::moe_token(stream, input, tensor_at(weights_.moe_score_b, layer), routing(),
                                 mlp, int64_t(meta_.n_experts_used));
    });
    return is_done;
}

void MoeLayers::route(const device::Stream &stream, size_t layer, const ops::Norm &norm,
                      const Buffers &buffers, ops::Residual *residual) const {
    const ops::LinearWeight &router = layers_[layer].router.weight;
    const Tensor *router_bias = tensor_at(weights_.moe_router_b, layer);
    const Tensor *score_bias = tensor_at(weights_.moe_score_b, layer);
    const ops::MoeRouting routing = this->routing();
    const Tensor &sum = ops::settle(stream, residual);
    if (norm.kind == ops::NormKind::rms &&
        ops::moe_norm_route(stream, buffers.experts, buffers.weights,
                            {sum, norm.weight, norm.epsilon, norm.normed, &router, router_bias},
                            score_bias, routing)) {
        return;
    }
    ops::norm_rows(stream, norm.normed, sum, norm);
    const ops::LinearPart part{&router, router_bias, &buffers.logits};
    ops::linear(stream, norm.normed, &part, 1);
    ops::moe_route(stream, buffers.experts, buffers.weights, buffers.logits, score_bias, routing);
}

void MoeLayers::run_experts(const device::Stream &stream, size_t layer, const Tensor &normed,
                            const Buffers &buffers, const Tensor &out, bool adds) const {
    use_experts(layer, [&](const ops::ExpertMlp &mlp) {
        ops::moe_mlp(stream, out, adds, normed, buffers.experts, buffers.weights, mlp,
                     {buffers.gate, buffers.up, buffers.out, buffers.sorted});
    });
}

void MoeLayers::run_shared_input(const device::Stream &stream, const Layer &layer,
                                 const Tensor &normed, const Buffers &buffers) const {
    const ops::LinearPart parts[] = {{&layer.shared_gate.weight, nullptr, &buffers.shared_gate},
                                     {&layer.shared_up.weight, nullptr, &buffers.shared_up},
                                     {&layer.shared_scale.weight, nullptr, &buffers.shared_scale}};
    const bool has_scale = meta_.moe_has_shared_gate != 0;
    ops::linear(stream, normed, parts, has_scale ? 3 : 2);
    ops::swiglu(stream, buffers.shared_gate, buffers.shared_gate, buffers.shared_up);
    if (has_scale) {
        ops::sigmoid_scale(stream, buffers.shared_gate, buffers.shared_scale);
    }
}

} // namespace llaisys::models
