#include "models/decoder/decoder.hpp"

#include "models/hyper_params.hpp"
#include "ops/elementwise/op.hpp"
#include "ops/embedding/op.hpp"
#include "ops/norm/op.hpp"
#include "ops/rearrange/op.hpp"
#include "ops/rope/op.hpp"
#include "parallel/tensor_parallel.hpp"

#include <algorithm>

namespace llaisys::models {

using runtime::tensor_at;

namespace {

float or_one(float factor) { return factor != 0 ? factor : 1.0f; }

} // namespace

DecoderModel::DecoderModel(LlaisysModelType type, const LlaisysDecoderMeta &meta,
                           const ModelPlacement &placement)
    : SlotModel(spec_of(type, shard_meta(check_hyper_params(meta), placement), placement),
                placement),
      group_(placement.group), stages_(placement.stages),
      is_first_stage_(placement.is_first_stage()), is_last_stage_(placement.is_last_stage()),
      meta_(without_pointers(shard_meta(meta, placement))), scale_(attention_scale(meta)),
      layers_(meta.nlayer), moe_(shard_meta(meta, placement), placement.group), latent_(meta_) {
    const int64_t ranks = group_->size();
    if (placement.vocab_parallel_head && ranks > 1 && is_last_stage_) {
        const int64_t vocabulary = int64_t(meta_.voc);
        head_columns_ = (vocabulary + ranks - 1) / ranks;
        require(vocabulary > (ranks - 1) * head_columns_, "meta.voc, ", vocabulary,
                ", is too small: the last of ", ranks, " ranks has no row of the head");
    }
    for (size_t i = 0; i < meta_.nlayer; ++i) {
        inv_freqs_.push_back(ops::layer_frequencies(spec().kv.inv_freq, int64_t(i)));
    }
    register_slots();
}

// The residual stream and the logits are always f32.
DecoderModel::Activations DecoderModel::allocate_activations(runtime::Workspace &workspace,
                                                             int64_t n, int64_t n_outputs) const {
    const int64_t hidden = int64_t(meta_.hs);
    const int64_t inner = int64_t(meta_.di);
    const int64_t q_size = latent_.is_used() ? 0 : int64_t(meta_.nh * meta_.dh);
    const int64_t kv_size = latent_.is_used() ? 0 : int64_t(meta_.nkvh * meta_.dh);
    const DType dtype = activation_dtype(meta_.dtype);
    Activations act;
    act.latent = latent_.allocate(workspace, n, dtype);
    act.moe = moe_.allocate(workspace, n, dtype, table_.device() == LLAISYS_DEVICE_CPU);
    act.residual = workspace.allocate({n, hidden}, LLAISYS_DTYPE_F32);
    act.normed = workspace.allocate({n, hidden}, dtype);
    act.attn_out = workspace.allocate({n, int64_t(meta_.nh), value_dim()}, dtype);
    const int64_t head_rows = std::min(kHeadRows, n_outputs);
    if (head_columns_ > 0 && head_rows > 0) {
        act.own_logits = workspace.allocate({head_rows, head_columns_}, LLAISYS_DTYPE_F32);
        act.all_logits =
            workspace.allocate({group_->size(), head_rows, head_columns_}, LLAISYS_DTYPE_F32);
    }
    const int64_t last_rows = std::min(kLastRows, n_outputs);
    if (last_rows > 0) {
        act.last_residual = workspace.allocate({last_rows, hidden}, LLAISYS_DTYPE_F32);
        act.last_attn_out = workspace.allocate({last_rows, int64_t(meta_.nh), value_dim()}, dtype);
    }
    if (lora_.n_slots() > 0) {
        act.lora = workspace.allocate({lora_.scratch(n)}, LLAISYS_DTYPE_F32);
        act.lora_terms = workspace.allocate({lora_.scratch_of_pending(n)}, LLAISYS_DTYPE_F32);
    }
    if (meta_.has_positions != 0 || meta_.n_token_types > 0) {
        act.embedded = workspace.allocate({n, hidden}, LLAISYS_DTYPE_F32);
    }
    if (!aux_hidden_layers_.empty()) {
        act.aux_hidden = workspace.allocate({n, hidden}, LLAISYS_DTYPE_F32);
    }
    if (table_.device() == LLAISYS_DEVICE_CPU) {
        act.q = workspace.allocate({n, q_size}, dtype);
        act.k = workspace.allocate({n, kv_size}, dtype);
        act.v = workspace.allocate({n, kv_size}, dtype);
        act.gate = workspace.allocate({n, inner}, dtype);
        act.up = workspace.allocate({n, inner}, dtype);
        return act;
    }
    // Adjacent columns, as in the fused weights: one product.
    const Tensor qkv = workspace.allocate({n, q_size + 2 * kv_size}, dtype);
    const Tensor gate_up = workspace.allocate({n, 2 * inner}, dtype);
    if (qkv.defined()) { // not while measuring
        act.q = qkv.slice(1, 0, q_size);
        act.k = qkv.slice(1, q_size, q_size + kv_size);
        act.v = qkv.slice(1, q_size + kv_size, q_size + 2 * kv_size);
        act.gate = gate_up.slice(1, 0, inner);
        act.up = gate_up.slice(1, inner, 2 * inner);
    }
    return act;
}

int64_t DecoderModel::workspace_bytes(int64_t n, int64_t n_outputs) const {
    runtime::Workspace workspace = runtime::Workspace::measuring();
    allocate_activations(workspace, n, n_outputs);
    return workspace.used();
}

void DecoderModel::forward(const device::Stream &stream, runtime::Workspace &workspace,
                           const ModelInput &input, const AttentionMetadata &attention,
                           ForwardOutput *output) {
    const int64_t n_outputs = input.output_rows.defined() ? input.output_rows.size(0) : 0;
    const Activations act = allocate_activations(workspace, input.n_tokens, n_outputs);
    const auto run = [&] { run_layers(stream, input, attention, act, output); };
    parallel::abort_on_error(*group_,
                             [&] { stages_ ? parallel::abort_on_error(*stages_, run) : run(); });
}

void DecoderModel::run_layers(const device::Stream &stream, const ModelInput &input,
                              const AttentionMetadata &attention, const Activations &act,
                              ForwardOutput *output) const {
    require(meta_.has_no_head == 0 || !input.output_rows.defined(),
            "logits must not be requested: the model has no output matrix");
    if (is_first_stage_) {
        embed(stream, input, act);
    } else {
        stages_->Recv(act.residual, stages_->rank() + group_->size());
    }
    ops::Residual residual{act.residual, Tensor()};
    Activations tail = act; // after the attention of the last layer; may have fewer rows
    const ops::LoraRows *lora_rows = input.lora.rows.defined() ? &input.lora : nullptr;
    const bool has_outputs =
        input.output_rows.defined() || input.hidden_rows.defined() || !aux_hidden_layers_.empty();
    for (size_t i = 0; i < layers_.size(); ++i) {
        const bool is_last = is_last_stage_ && i + 1 == layers_.size();
        with_context("layer", i, [&] {
            if (!aux_hidden_layers_.empty()) {
                ops::settle_lora(stream, &residual);
            }
            store_aux_hidden(stream, int32_t(i), act, residual, output->aux_hidden);
            project(stream, i, input, attention, act, &residual);
            if (is_last && !has_outputs) {
                return; // a prompt chunk without outputs: only its keys and values are needed
            }
            attend(stream, i, attention, act);
            if (is_last && selects_output_rows(input)) {
                tail = select_output_rows(stream, input, act, &residual);
                lora_rows = lora_rows != nullptr ? &input.last_lora : nullptr;
            }
            feed_forward(stream, i, tail, lora_rows, &residual);
        });
    }
    if (!is_last_stage_) {
        ops::settle_lora(stream, &residual);
        stages_->Send(ops::settle(stream, &residual), stages_->rank() - group_->size());
        return;
    }
    if (!has_outputs) {
        return;
    }
    if (!aux_hidden_layers_.empty()) {
        ops::settle_lora(stream, &residual);
    }
    store_aux_hidden(stream, int32_t(layers_.size()), act, residual, output->aux_hidden);
    store_aux_hidden(stream, -1, act, residual, output->aux_hidden);
    if (input.hidden_rows.defined()) {
        ops::hidden_rows(stream, output->hidden, &residual, out_norm(act), input.hidden_rows);
    }
    if (input.output_rows.defined()) {
        run_head(stream, selects_output_rows(input) ? input.last_row_indices : input.output_rows,
                 tail, &residual, output->logits);
    }
}

bool DecoderModel::selects_output_rows(const ModelInput &input) const {
    return input.last_rows.defined() && input.last_rows.size(0) <= kLastRows;
}

DecoderModel::Activations DecoderModel::select_output_rows(const device::Stream &stream,
                                                           const ModelInput &input,
                                                           const Activations &act,
                                                           ops::Residual *residual) const {
    const int64_t n = input.last_rows.size(0);
    Activations selected = act;
    selected.residual = act.last_residual.slice(0, 0, n);
    selected.attn_out = act.last_attn_out.slice(0, 0, n);
    selected.normed = act.normed.slice(0, 0, n);
    selected.gate = act.gate.slice(0, 0, n);
    selected.up = act.up.slice(0, 0, n);
    selected.moe = act.moe.first(n, moe_.experts_per_token());
    const int64_t width = int64_t(meta_.nh) * value_dim();
    ops::embedding(stream, selected.residual, input.last_rows, residual->sum);
    ops::embedding(stream, selected.attn_out.view({n, width}), input.last_rows,
                   act.attn_out.view({act.attn_out.size(0), width}));
    residual->sum = selected.residual;
    return selected;
}

void DecoderModel::run_head(const device::Stream &stream, const Tensor &rows,
                            const Activations &act, ops::Residual *residual,
                            const Tensor &logits) const {
    const ops::Norm last_norm = out_norm(act);
    if (head_columns_ == 0) {
        ops::head(stream, logits, residual, last_norm, head_.weight, rows);
    }
    const int64_t own = head_.weight.out_features;
    for (int64_t first = 0; head_columns_ > 0 && first < logits.size(0); first += kHeadRows) {
        const int64_t n = std::min(kHeadRows, logits.size(0) - first);
        // Contiguous for any n; every rank has the width of the widest shard.
        const Tensor part = act.own_logits.slice(0, 0, n);
        const Tensor parts =
            act.all_logits.view({group_->size() * act.all_logits.size(1), head_columns_})
                .slice(0, 0, group_->size() * n)
                .view({group_->size(), n, head_columns_});
        ops::head(stream, part.slice(1, 0, own), residual, last_norm, head_.weight,
                  rows.slice(0, first, first + n));
        parallel::gather_columns(stream, *group_, logits.slice(0, first, first + n), part, parts);
    }
    const float scale = or_one(meta_.logit_scale);
    if (scale != 1.0f || meta_.logit_soft_cap != 0) {
        ops::scale(stream, logits, logits, scale, meta_.logit_soft_cap);
    }
}

void DecoderModel::set_aux_hidden_layers(const std::vector<int32_t> &layers) {
    if (stages_ && !layers.empty()) {
        fail(LLAISYS_ERROR_UNSUPPORTED, "hidden states of layers need a model of one stage");
    }
    for (size_t i = 0; i < layers.size(); ++i) {
        require(layers[i] >= -1 && layers[i] <= int32_t(meta_.nlayer), "layers[", i,
                "] must be in [-1, ", meta_.nlayer, "], got ", layers[i]);
    }
    aux_hidden_layers_ = layers;
}

// Computes a copy of the sum that the next norm computes too, so that storing it does not change
// any other result.
void DecoderModel::store_aux_hidden(const device::Stream &stream, int32_t layer,
                                    const Activations &act, const ops::Residual &residual,
                                    const Tensor &hidden) const {
    const int64_t size = int64_t(meta_.hs);
    for (size_t i = 0; i < aux_hidden_layers_.size(); ++i) {
        if (aux_hidden_layers_[i] != layer) {
            continue;
        }
        const Tensor out = hidden.slice(1, int64_t(i) * size, int64_t(i + 1) * size);
        if (residual.addend.defined()) {
            ops::add(stream, act.aux_hidden, residual.sum, residual.addend);
        } else {
            ops::rearrange(stream, act.aux_hidden, residual.sum);
        }
        if (layer < 0) {
            ops::norm_rows(stream, out, act.aux_hidden, out_norm(act));
        } else {
            ops::rearrange(stream, out, act.aux_hidden);
        }
    }
}

ops::Norm DecoderModel::norm(llaisysTensor_t weight, llaisysTensor_t bias,
                             const Tensor &normed) const {
    static const Tensor no_weight;
    if (weight == nullptr) {
        return {no_weight, meta_.epsilon, normed, ops::NormKind::none};
    }
    const bool is_rms = meta_.norm_kind == LLAISYS_NORM_RMS;
    return {weight->tensor, meta_.epsilon, normed,
            is_rms ? ops::NormKind::rms : ops::NormKind::layer,
            bias != nullptr ? &bias->tensor : nullptr};
}

ops::Norm DecoderModel::out_norm(const Activations &act) const {
    return norm(weights_.out_norm_w, weights_.out_norm_b, act.normed);
}

ops::Norm DecoderModel::attn_norm(size_t i, const Activations &act) const {
    return norm(weights_.attn_norm_w[i], weights_.attn_norm_b[i], act.normed);
}

ops::Norm DecoderModel::mlp_norm(size_t i, const Activations &act) const {
    return norm(weights_.mlp_norm_w[i], weights_.mlp_norm_b[i], act.normed);
}

void DecoderModel::embed(const device::Stream &stream, const ModelInput &input,
                         const Activations &act) const {
    const Tensor &out = act.residual;
    if (!input.token_ids.defined()) {
        ops::rearrange(stream, out, input.embeddings);
    } else if (in_embed_.weight.defined()) {
        ops::linear_rows(stream, out, input.token_ids, in_embed_.weight);
    } else {
        ops::embedding(stream, out, input.token_ids, weights_.in_embed->tensor);
    }
    if (input.token_ids.defined() && or_one(meta_.embedding_scale) != 1.0f) {
        ops::scale(stream, out, out, meta_.embedding_scale);
    }
    if (meta_.has_positions != 0) {
        ops::embedding(stream, act.embedded, input.positions, weights_.pos_embed->tensor);
        ops::add(stream, out, out, act.embedded);
    }
    if (meta_.n_token_types > 0) {
        ops::embedding(stream, act.embedded, input.token_types, weights_.type_embed->tensor);
        ops::add(stream, out, out, act.embedded);
    }
    if (meta_.has_embed_norm != 0) {
        ops::norm_rows(stream, out, out, norm(weights_.embed_norm_w, weights_.embed_norm_b, out));
    }
}

void DecoderModel::project(const device::Stream &stream, size_t i, const ModelInput &input,
                           const AttentionMetadata &attention, const Activations &act,
                           ops::Residual *residual) const {
    const ops::Placement placement{input.positions, inv_freqs_[i], attention.slots, attention.kv[i],
                                   or_one(meta_.rope_factor)};
    if (latent_.is_used()) {
        return latent_.project(stream, i, residual, attn_norm(i, act), placement, act.latent);
    }
    const Layer &layer = layers_[i];
    const ops::HeadNorms head_norms{tensor_at(weights_.attn_q_norm_w, i),
                                    tensor_at(weights_.attn_k_norm_w, i)};
    ops::attention_input(stream, residual, attn_norm(i, act),
                         {&layer.q.weight, tensor_at(weights_.attn_q_b, i), &act.q},
                         {&layer.k.weight, tensor_at(weights_.attn_k_b, i), &act.k},
                         {&layer.v.weight, tensor_at(weights_.attn_v_b, i), &act.v}, head_norms,
                         placement,
                         lora(i, {LoraTarget::q, LoraTarget::k, LoraTarget::v},
                              input.lora.rows.defined() ? &input.lora : nullptr, act));
}

void DecoderModel::attend(const device::Stream &stream, size_t i,
                          const AttentionMetadata &attention, const Activations &act) const {
    const ops::KvLayer &kv = attention.kv[i];
    if (latent_.is_used()) {
        return latent_.attend(stream, i, act.attn_out, kv, attention.lists_of(i), scale_,
                              act.latent);
    }
    ops::attention(stream, act.attn_out, act.q.view(act.attn_out.shape()), kv,
                   attention.lists_of(i), scale_, meta_.attention_soft_cap,
                   tensor_at(weights_.attn_sinks_w, i));
}

void DecoderModel::mlp_input(const device::Stream &stream, size_t i, const ops::Norm &norm,
                             const Activations &act, const ops::LoraRows *lora_rows,
                             ops::Residual *residual) const {
    const Layer &layer = layers_[i];
    const Tensor *up_bias = tensor_at(weights_.mlp_up_b, i);
    const auto activation = meta_.mlp_kind == LLAISYS_MLP_SWIGLU     ? ops::Activation::silu
                            : meta_.mlp_kind == LLAISYS_MLP_GELU_ERF ? ops::Activation::gelu_erf
                                                                     : ops::Activation::gelu_tanh;
    if (!has_gate()) {
        return ops::mlp_input(stream, residual, norm, {&layer.up.weight, up_bias, &act.gate},
                              {nullptr, nullptr, nullptr}, activation,
                              lora(i, {LoraTarget::up}, lora_rows, act));
    }
    ops::Lora adapters = lora(i, {LoraTarget::gate, LoraTarget::up}, lora_rows, act);
    if (lora_rows != nullptr && meta_.is_parallel == 0 && group_->size() == 1 &&
        weights_.mlp_post_norm_w[i] == nullptr && or_one(meta_.residual_scale) == 1.0f) {
        adapters.next = &lora_.weight(i, LoraTarget::down); // add_product() adds it as it is
    }
    ops::mlp_input(stream, residual, norm, {&layer.gate.weight, nullptr, &act.gate},
                   {&layer.up.weight, up_bias, &act.up}, activation, adapters);
}

void DecoderModel::feed_forward(const device::Stream &stream, size_t i, const Activations &act,
                                const ops::LoraRows *lora_rows, ops::Residual *residual) const {
    const Layer &layer = layers_[i];
    const Tensor &attended = act.attn_out;
    if (meta_.is_parallel != 0) { // both read the residual stream before either adds to it
        mlp_input(stream, i, attn_norm(i, act), act, lora_rows, residual);
    }
    add_product(stream, residual,
                attended.view({attended.size(0), attended.size(1) * attended.size(2)}),
                layer.o.weight, tensor_at(weights_.attn_o_b, i),
                {weights_.attn_post_norm_w[i], weights_.attn_post_norm_b[i]}, act.normed,
                lora(i, {LoraTarget::o}, lora_rows, act));
    if (moe_.has(i)) {
        return moe_.run(stream, i, mlp_norm(i, act), act.moe, or_one(meta_.residual_scale),
                        residual);
    }
    if (meta_.is_parallel != 0) {
        ops::settle(stream, residual);
    } else {
        mlp_input(stream, i, mlp_norm(i, act), act, lora_rows, residual);
    }
    add_product(stream, residual, act.gate, layer.down.weight, tensor_at(weights_.mlp_down_b, i),
                {weights_.mlp_post_norm_w[i], weights_.mlp_post_norm_b[i]}, act.normed,
                lora(i, {LoraTarget::down}, lora_rows, act));
}

void DecoderModel::add_product(const device::Stream &stream, ops::Residual *residual,
                               const Tensor &in, const ops::LinearWeight &weight,
                               const Tensor *bias, const PostNorm &post_norm, const Tensor &scratch,
                               const ops::Lora &lora) const {
    const float scale = or_one(meta_.residual_scale);
    const bool norms_residual = meta_.norm_position == LLAISYS_NORM_RESIDUAL;
    const bool norms_output = post_norm.weight != nullptr && !norms_residual;
    const auto norm_residual = [&] {
        if (norms_residual) {
            const Tensor &sum = ops::settle(stream, residual);
            ops::norm_rows(stream, sum, sum, norm(post_norm.weight, post_norm.bias, sum));
        }
    };
    if (group_->size() == 1 && !norms_output && scale == 1.0f) {
        ops::add_product(stream, residual, in, weight, bias, scratch, lora);
        return norm_residual();
    }
    ops::settle(stream, residual);
    if (group_->size() == 1) {
        const ops::LinearPart part{&weight, bias, &scratch};
        ops::linear(stream, in, &part, 1);
        ops::apply_lora(stream, lora, in, {&scratch});
    } else {
        parallel::row_parallel_linear(stream, *group_, scratch, in, weight, bias, false);
        ops::apply_lora(stream, lora, in, {&scratch}); // A x is this rank's term of a sum
        if (!norms_output && scale == 1.0f && group_->AllReduceAdd(residual->sum, scratch)) {
            return norm_residual();
        }
        group_->AllReduce(scratch);
    }
    if (norms_output) {
        ops::norm_rows(stream, scratch, scratch, norm(post_norm.weight, post_norm.bias, scratch));
    }
    if (scale != 1.0f) {
        ops::scale(stream, scratch, scratch, scale);
    }
    residual->addend = scratch;
    norm_residual();
}

} // namespace llaisys::models
