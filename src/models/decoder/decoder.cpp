#include "models/decoder/decoder.hpp"

#include "models/hyper_params.hpp"
#include "ops/elementwise/op.hpp"
#include "ops/embedding/op.hpp"
#include "ops/rearrange/op.hpp"
#include "ops/rope/op.hpp"
#include "parallel/tensor_parallel.hpp"

#include <algorithm>

namespace llaisys::models {

using runtime::tensor_at;

DecoderModel::DecoderModel(LlaisysModelType type, const LlaisysDecoderMeta &meta,
                           const ModelPlacement &placement)
    : SlotModel(spec_of(type, shard_meta(check_hyper_params(meta), placement), placement),
                placement),
      group_(placement.group), stages_(placement.stages),
      is_first_stage_(placement.is_first_stage()), is_last_stage_(placement.is_last_stage()),
      meta_(without_pointers(shard_meta(meta, placement))), scale_(attention_scale(meta)),
      layers_(meta.nlayer), latent_(meta_), output_(meta_, group_),
      mlp_(shard_meta(meta, placement), weights_, lora_, output_, group_) {
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
    const int64_t q_size = latent_.is_used() ? 0 : int64_t(meta_.nh * meta_.dh);
    const int64_t kv_size = latent_.is_used() ? 0 : int64_t(meta_.nkvh * meta_.dh);
    const DType dtype = activation_dtype(meta_.dtype);
    const bool is_cpu = table_.device() == LLAISYS_DEVICE_CPU;
    Activations act;
    act.latent = latent_.allocate(workspace, n, dtype);
    act.mlp = mlp_.allocate(workspace, n, dtype, is_cpu);
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
    act.lora = lora_.allocate(workspace, n);
    if (meta_.has_positions != 0 || meta_.n_token_types > 0) {
        act.embedded = workspace.allocate({n, hidden}, LLAISYS_DTYPE_F32);
    }
    if (!aux_hidden_layers_.empty()) {
        act.aux_hidden = workspace.allocate({n, hidden}, LLAISYS_DTYPE_F32);
    }
    if (is_cpu) {
        act.q = workspace.allocate({n, q_size}, dtype);
        act.k = workspace.allocate({n, kv_size}, dtype);
        act.v = workspace.allocate({n, kv_size}, dtype);
        return act;
    }
    // Adjacent columns, as in the fused weights: one product.
    const Tensor qkv = workspace.allocate({n, q_size + 2 * kv_size}, dtype);
    if (qkv.defined()) { // not while measuring
        act.q = qkv.slice(1, 0, q_size);
        act.k = qkv.slice(1, q_size, q_size + kv_size);
        act.v = qkv.slice(1, q_size + kv_size, q_size + 2 * kv_size);
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
    Activations act = allocate_activations(workspace, input.n_tokens, n_outputs);
    act.lora.rows = input.lora.rows.defined() ? &input.lora : nullptr;
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
            }
            feed_forward(stream, i, tail, &residual);
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
    selected.mlp = mlp_.first(act.mlp, n);
    selected.lora.rows = act.lora.rows != nullptr ? &input.last_lora : nullptr;
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

ops::Norm DecoderModel::out_norm(const Activations &act) const {
    return norm_of(meta_, weights_.out_norm_w, weights_.out_norm_b, act.normed);
}

ops::Norm DecoderModel::attn_norm(size_t i, const Activations &act) const {
    return norm_of(meta_, weights_.attn_norm_w[i], weights_.attn_norm_b[i], act.normed);
}

ops::Norm DecoderModel::mlp_norm(size_t i, const Activations &act) const {
    return norm_of(meta_, weights_.mlp_norm_w[i], weights_.mlp_norm_b[i], act.normed);
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
        ops::norm_rows(stream, out, out,
                       norm_of(meta_, weights_.embed_norm_w, weights_.embed_norm_b, out));
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
                         lora_.product(i, {LoraTarget::q, LoraTarget::k, LoraTarget::v}, act.lora));
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

void DecoderModel::feed_forward(const device::Stream &stream, size_t i, const Activations &act,
                                ops::Residual *residual) const {
    const Tensor &attended = act.attn_out;
    const bool is_parallel = meta_.is_parallel != 0; // attention and MLP have one input
    if (is_parallel) {
        mlp_.compute_input(stream, i, attn_norm(i, act), act.mlp, act.lora, residual);
    }
    output_.add_product(stream, residual,
                        attended.view({attended.size(0), attended.size(1) * attended.size(2)}),
                        layers_[i].o.weight, tensor_at(weights_.attn_o_b, i),
                        {weights_.attn_post_norm_w[i], weights_.attn_post_norm_b[i]}, act.normed,
                        lora_.product(i, {LoraTarget::o}, act.lora));
    if (is_parallel) {
        ops::settle(stream, residual);
        return mlp_.add_output(stream, i, act.normed, act.mlp, act.lora, residual);
    }
    mlp_.run(stream, i, mlp_norm(i, act), act.mlp, act.lora, residual);
}

} // namespace llaisys::models
