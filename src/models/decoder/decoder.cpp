#include "models/decoder/decoder.hpp"

#include "models/hyper_params.hpp"
#include "ops/embedding/op.hpp"
#include "ops/kv_store/op.hpp"
#include "ops/rearrange/op.hpp"
#include "ops/rms_norm/op.hpp"
#include "ops/rope/op.hpp"
#include "ops/swiglu/op.hpp"

#include <cmath>

namespace llaisys::models {

DecoderModel::DecoderModel(LlaisysModelType type, const LlaisysDecoderMeta &meta,
                           const ModelSite &site)
    : type_(type), group_(site.group), table_(site.device, site.device_id), packed_(table_) {
    check_hyper_params(meta);
    windows_ = windows_of(meta);
    meta_ = share_of(meta, site);
    meta_.layer_windows = nullptr;
    layers_.resize(meta_.nlayer);
    register_slots();
    kv_spec_ = {int64_t(meta_.nlayer), int64_t(meta_.nkvh), int64_t(meta_.dh), meta_.dtype,
                rotary_frequencies(meta_, site.device, site.device_id)};
}

void DecoderModel::register_slots() {
    const int n_layers = int(meta_.nlayer);
    const int64_t hidden = int64_t(meta_.hs);
    const int64_t q_size = int64_t(meta_.nh * meta_.dh);
    const int64_t kv_size = int64_t(meta_.nkvh * meta_.dh);
    const int64_t inner = int64_t(meta_.di);
    const Shape embedding{int64_t(meta_.voc), hidden};

    table_.add_global("in_embed", &weights_.in_embed, embedding);
    table_.add_global("out_embed", &weights_.out_embed, embedding);
    table_.add_global("out_norm_w", &weights_.out_norm_w, {hidden});
    packed_.add_lookup(&weights_.in_embed, &in_embed_);
    packed_.add(&weights_.out_embed, &head_);

    constexpr int kLayerFields = 15;
    layer_slots_.reserve(kLayerFields);
    const auto add = [&](const char *name, llaisysTensor_t **slots, const Shape &shape,
                         bool is_optional = false) {
        layer_slots_.emplace_back(meta_.nlayer, nullptr);
        *slots = layer_slots_.back().data();
        table_.add_layers(name, *slots, n_layers, shape, is_optional);
    };
    const auto add_linear = [&](const char *name, llaisysTensor_t **slots, const Shape &shape,
                                runtime::PackedWeight Layer::*packed) {
        add(name, slots, shape);
        for (size_t i = 0; i < layers_.size(); ++i) {
            packed_.add(*slots + i, &(layers_[i].*packed));
        }
    };
    add("attn_norm_w", &weights_.attn_norm_w, {hidden});
    add_linear("attn_q_w", &weights_.attn_q_w, {q_size, hidden}, &Layer::q);
    add("attn_q_b", &weights_.attn_q_b, {q_size}, true);
    add_linear("attn_k_w", &weights_.attn_k_w, {kv_size, hidden}, &Layer::k);
    add("attn_k_b", &weights_.attn_k_b, {kv_size}, true);
    add_linear("attn_v_w", &weights_.attn_v_w, {kv_size, hidden}, &Layer::v);
    add("attn_v_b", &weights_.attn_v_b, {kv_size}, true);
    add_linear("attn_o_w", &weights_.attn_o_w, {hidden, q_size}, &Layer::o);
    add("attn_o_b", &weights_.attn_o_b, {hidden}, true);
    const bool has_no_norms = type_ != LLAISYS_MODEL_TYPE_QWEN3;
    add("attn_q_norm_w", &weights_.attn_q_norm_w, {int64_t(meta_.dh)}, has_no_norms);
    add("attn_k_norm_w", &weights_.attn_k_norm_w, {int64_t(meta_.dh)}, has_no_norms);
    add("mlp_norm_w", &weights_.mlp_norm_w, {hidden});
    add_linear("mlp_gate_w", &weights_.mlp_gate_w, {inner, hidden}, &Layer::gate);
    add_linear("mlp_up_w", &weights_.mlp_up_w, {inner, hidden}, &Layer::up);
    add_linear("mlp_down_w", &weights_.mlp_down_w, {hidden, inner}, &Layer::down);
}

DecoderModel::Activations DecoderModel::take_activations(runtime::Workspace &workspace,
                                                         int64_t n) const {
    const int64_t hidden = int64_t(meta_.hs);
    const int64_t inner = int64_t(meta_.di);
    const Shape q_shape{n, int64_t(meta_.nh), int64_t(meta_.dh)};
    const Shape kv_shape{n, int64_t(meta_.nkvh), int64_t(meta_.dh)};
    Activations act;
    act.residual = workspace.take({n, hidden}, LLAISYS_DTYPE_F32);
    act.normed = workspace.take({n, hidden}, LLAISYS_DTYPE_F32);
    act.q = workspace.take(q_shape, LLAISYS_DTYPE_F32);
    act.k = workspace.take(kv_shape, LLAISYS_DTYPE_F32);
    act.v = workspace.take(kv_shape, LLAISYS_DTYPE_F32);
    act.attn_out = workspace.take(q_shape, LLAISYS_DTYPE_F32);
    act.gate = workspace.take({n, inner}, LLAISYS_DTYPE_F32);
    act.up = workspace.take({n, inner}, LLAISYS_DTYPE_F32);
    return act;
}

int64_t DecoderModel::workspace_bytes(int64_t n, int64_t) const {
    runtime::Workspace workspace = runtime::Workspace::measuring();
    take_activations(workspace, n);
    return workspace.used();
}

void DecoderModel::forward(const device::Stream &stream, runtime::Workspace &workspace,
                           const ModelInput &input, const AttentionMetadata &attention,
                           ForwardOutput *output) {
    const Activations act = take_activations(workspace, input.n_tokens);
    parallel::or_abort(*group_, [&] { run_layers(stream, input, attention, act, output); });
}

void DecoderModel::run_layers(const device::Stream &stream, const ModelInput &input,
                              const AttentionMetadata &attention, const Activations &act,
                              ForwardOutput *output) const {
    embed(stream, input, act.residual);
    ops::rms_norm(stream, act.normed, act.residual, weights_.attn_norm_w[0]->tensor, meta_.epsilon);
    for (size_t i = 0; i < layers_.size(); ++i) {
        at_place("layer", i, [&] {
            attend(stream, i, input, attention, act);
            ops::add_rms_norm(stream, act.normed, act.residual, act.normed,
                              weights_.mlp_norm_w[i]->tensor, meta_.epsilon);
            feed_forward(stream, i, act);
            const bool is_last = i + 1 == layers_.size();
            const llaisysTensor_t next_norm =
                is_last ? weights_.out_norm_w : weights_.attn_norm_w[i + 1];
            ops::add_rms_norm(stream, act.normed, act.residual, act.normed, next_norm->tensor,
                              meta_.epsilon);
        });
    }
    if (input.output_rows.defined()) {
        const ops::LinearPart head{&head_.weight, nullptr, &output->logits};
        ops::linear(stream, act.normed, &head, 1, &input.output_rows);
    }
}

void DecoderModel::embed(const device::Stream &stream, const ModelInput &input,
                         const Tensor &out) const {
    if (!input.token_ids.defined()) {
        ops::rearrange(stream, out, input.embeddings);
    } else if (in_embed_.weight.defined()) {
        ops::linear_rows(stream, out, input.token_ids, in_embed_.weight);
    } else {
        ops::embedding(stream, out, input.token_ids, weights_.in_embed->tensor);
    }
}

void DecoderModel::norm_heads(const device::Stream &stream, const Tensor &x,
                              llaisysTensor_t weight) const {
    if (weight != nullptr) {
        const Tensor heads = x.view({x.size(0) * x.size(1), x.size(2)});
        ops::rms_norm(stream, heads, heads, weight->tensor, meta_.epsilon);
    }
}

void DecoderModel::attend(const device::Stream &stream, size_t i, const ModelInput &input,
                          const AttentionMetadata &attention, const Activations &act) const {
    const int64_t n = input.n_tokens;
    const Layer &layer = layers_[i];
    const ops::KvLayer &kv = attention.kv[i];
    const auto bias = [i](const llaisysTensor_t *slots) {
        return slots[i] != nullptr ? &slots[i]->tensor : nullptr;
    };
    const Tensor q = act.q.view({n, act.q.size(1) * act.q.size(2)});
    const Tensor k = act.k.view({n, act.k.size(1) * act.k.size(2)});
    const Tensor v = act.v.view(k.shape());
    const ops::LinearPart qkv[] = {{&layer.q.weight, bias(weights_.attn_q_b), &q},
                                   {&layer.k.weight, bias(weights_.attn_k_b), &k},
                                   {&layer.v.weight, bias(weights_.attn_v_b), &v}};
    ops::linear(stream, act.normed, qkv, 3);
    norm_heads(stream, act.q, weights_.attn_q_norm_w[i]);
    norm_heads(stream, act.k, weights_.attn_k_norm_w[i]);
    ops::rope(stream, act.q, act.q, input.positions, kv_spec_.inv_freq);
    ops::rope(stream, act.k, act.k, input.positions, kv_spec_.inv_freq);
    ops::kv_store(stream, kv, act.k, &act.v, attention.slots);
    ops::attention(stream, act.attn_out, act.q, kv, attention.lists_of(i),
                   1.0f / std::sqrt(float(kv_spec_.head_dim)));
    // Of a sum over ranks the bias is one term.
    const Tensor *o_bias = group_->rank() == 0 ? bias(weights_.attn_o_b) : nullptr;
    const ops::LinearPart o{&layer.o.weight, o_bias, &act.normed};
    ops::linear(stream, act.attn_out.view(q.shape()), &o, 1);
    group_->AllReduce(act.normed);
}

void DecoderModel::feed_forward(const device::Stream &stream, size_t i,
                                const Activations &act) const {
    const Layer &layer = layers_[i];
    const ops::LinearPart gate_up[] = {{&layer.gate.weight, nullptr, &act.gate},
                                       {&layer.up.weight, nullptr, &act.up}};
    ops::linear(stream, act.normed, gate_up, 2);
    ops::swiglu(stream, act.gate, act.gate, act.up);
    const ops::LinearPart down{&layer.down.weight, nullptr, &act.normed};
    ops::linear(stream, act.gate, &down, 1);
    group_->AllReduce(act.normed);
}

} // namespace llaisys::models
