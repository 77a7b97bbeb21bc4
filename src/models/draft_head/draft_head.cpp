#include "models/draft_head/draft_head.hpp"

#include "models/hyper_params.hpp"
#include "ops/elementwise/op.hpp"
#include "ops/embedding/op.hpp"
#include "ops/kv_store/op.hpp"
#include "ops/norm/op.hpp"
#include "ops/rearrange/op.hpp"
#include "ops/rope/op.hpp"

#include <numeric>

namespace llaisys::models {

namespace {

ModelSpec spec_of(const LlaisysDraftHeadMeta &meta, const ModelPlacement &placement) {
    const LlaisysDecoderMeta &decoder = check_hyper_params(meta.decoder);
    ModelSpec spec = models::spec_of(LLAISYS_MODEL_TYPE_DRAFT_HEAD, decoder, placement);
    spec.input_vocabulary = int64_t(meta.in_voc);
    spec.feature_size = int64_t(meta.n_features * decoder.hs);
    return spec;
}

} // namespace

DraftHead::DraftHead(const LlaisysDraftHeadMeta &meta, const ModelPlacement &placement)
    : SlotModel(spec_of(meta, placement), placement), meta_(meta),
      scale_(attention_scale(meta.decoder)) {
    meta_.decoder = without_pointers(meta.decoder);
    require(placement.group->size() == 1, "a draft head must have one rank, got ",
            placement.group->size());
    require(meta.kind >= LLAISYS_DRAFT_HEAD_EAGLE && meta.kind <= LLAISYS_DRAFT_HEAD_MTP,
            "meta.kind must be EAGLE (1), EAGLE3 (2) or MTP (3), got ", meta.kind);
    require(meta.decoder.nlayer == 1, "meta.decoder.nlayer must be 1, got ", meta.decoder.nlayer);
    require(meta.in_voc >= 1 && meta.in_voc <= size_t(1) << 24, "meta.in_voc must be in [1, ",
            size_t(1) << 24, "], got ", meta.in_voc);
    const size_t least = is(LLAISYS_DRAFT_HEAD_EAGLE3) ? 2 : 1;
    const size_t most = is(LLAISYS_DRAFT_HEAD_EAGLE3) ? 64 : 1;
    require(meta.n_features >= least && meta.n_features <= most, "meta.n_features must be in [",
            least, ", ", most, "], got ", meta.n_features);
    require(meta.reserved == 0, "meta.reserved must be 0, got ", meta.reserved);
    register_slots();
}

void DraftHead::register_slots() {
    const LlaisysDecoderMeta &meta = meta_.decoder;
    const int64_t hidden = int64_t(meta.hs);
    const int64_t q_size = int64_t(meta.nh * meta.dh);
    const int64_t kv_size = int64_t(meta.nkvh * meta.dh);
    const int64_t inner = int64_t(meta.di);
    const bool is_eagle = is(LLAISYS_DRAFT_HEAD_EAGLE);
    const bool is_eagle3 = is(LLAISYS_DRAFT_HEAD_EAGLE3);
    const auto add = [&](const char *name, llaisysTensor_t *slot, const Shape &shape,
                         bool is_there = true, bool is_optional = false) {
        if (is_there) {
            table_.add_layers(name, slot, 1, shape, is_optional);
        }
    };
    const auto add_linear = [&](const char *name, llaisysTensor_t *slot, const Shape &shape,
                                runtime::PackedWeight *packed, bool is_there = true) {
        add(name, slot, shape, is_there);
        if (is_there) {
            packed_.add(slot, packed);
        }
    };
    LlaisysDraftHeadWeights &w = weights_;
    add("in_embed", &w.in_embed, {int64_t(meta_.in_voc), hidden});
    packed_.add_lookup(&w.in_embed, &in_embed_);
    add_linear("out_embed", &w.out_embed, {int64_t(meta.voc), hidden}, &out_embed_);
    add("out_norm_w", &w.out_norm_w, {hidden}, !is_eagle);
    add("token_norm_w", &w.token_norm_w, {hidden}, !is_eagle);
    add("hidden_norm_w", &w.hidden_norm_w, {hidden}, !is_eagle);
    add_linear("feature_w", &w.feature_w, {hidden, spec().feature_size}, &feature_, is_eagle3);
    add_linear("fuse_token_w", &w.fuse_token_w, {hidden, hidden}, &fuse_token_, !is_eagle3);
    add_linear("fuse_hidden_w", &w.fuse_hidden_w, {hidden, hidden}, &fuse_hidden_, !is_eagle3);
    add("fuse_b", &w.fuse_b, {hidden}, !is_eagle3, true);
    add("attn_norm_w", &w.attn_norm_w, {hidden}, is(LLAISYS_DRAFT_HEAD_MTP));
    add_linear("attn_q_w", &w.attn_q_w, {q_size, hidden}, &q_);
    add("attn_q_b", &w.attn_q_b, {q_size}, true, true);
    add_linear("attn_k_w", &w.attn_k_w, {kv_size, hidden}, &k_);
    add("attn_k_b", &w.attn_k_b, {kv_size}, true, true);
    add_linear("attn_v_w", &w.attn_v_w, {kv_size, hidden}, &v_);
    add("attn_v_b", &w.attn_v_b, {kv_size}, true, true);
    add_linear("attn_q_token_w", &w.attn_q_token_w, {q_size, hidden}, &q_token_, is_eagle3);
    add_linear("attn_k_token_w", &w.attn_k_token_w, {kv_size, hidden}, &k_token_, is_eagle3);
    add_linear("attn_v_token_w", &w.attn_v_token_w, {kv_size, hidden}, &v_token_, is_eagle3);
    add_linear("attn_o_w", &w.attn_o_w, {hidden, q_size}, &o_);
    add("mlp_norm_w", &w.mlp_norm_w, {hidden});
    add_linear("mlp_gate_w", &w.mlp_gate_w, {inner, hidden}, &gate_);
    add_linear("mlp_up_w", &w.mlp_up_w, {inner, hidden}, &up_);
    add_linear("mlp_down_w", &w.mlp_down_w, {hidden, inner}, &down_);
}

DraftHead::Activations DraftHead::allocate_activations(runtime::Workspace &workspace,
                                                       int64_t n) const {
    const LlaisysDecoderMeta &meta = meta_.decoder;
    const DType dtype = activation_dtype(meta.dtype);
    const auto take = [&](size_t size) { return workspace.allocate({n, int64_t(size)}, dtype); };
    Activations act;
    for (Tensor *tensor : {&act.residual, &act.fused}) {
        *tensor = workspace.allocate({n, int64_t(meta.hs)}, LLAISYS_DTYPE_F32);
    }
    act.normed = take(meta.hs);
    act.token = take(meta.hs);
    if (dtype != LLAISYS_DTYPE_F32 && !is(LLAISYS_DRAFT_HEAD_MTP)) {
        act.feature = take(size_t(spec().feature_size));
    }
    for (Tensor *tensor : {&act.q, &act.q_token, &act.attn_out}) {
        *tensor = take(meta.nh * meta.dh);
    }
    for (Tensor *tensor : {&act.k, &act.k_token, &act.v, &act.v_token}) {
        *tensor = take(meta.nkvh * meta.dh);
    }
    act.gate = take(meta.di);
    act.up = take(meta.di);
    return act;
}

int64_t DraftHead::workspace_bytes(int64_t n, int64_t) const {
    runtime::Workspace workspace = runtime::Workspace::measuring();
    allocate_activations(workspace, n);
    return workspace.used();
}

void DraftHead::norm(const device::Stream &stream, const Tensor &out, const Tensor &in,
                     llaisysTensor_t weight) const {
    ops::rms_norm(stream, out, in, weight->tensor, meta_.decoder.epsilon);
}

const Tensor &DraftHead::to_activation_dtype(const device::Stream &stream, const Tensor &in,
                                             const Tensor &buffer) const {
    if (activation_dtype(meta_.decoder.dtype) == LLAISYS_DTYPE_F32) {
        return in;
    }
    ops::embedding(stream, buffer, row_indices_.slice(0, 0, in.size(0)), in);
    return buffer;
}

void DraftHead::forward(const device::Stream &stream, runtime::Workspace &workspace,
                        const ModelInput &input, const AttentionMetadata &attention,
                        ForwardOutput *output) {
    require(!input.hidden_rows.defined(), "tokens of a draft head cannot be pooled");
    const Activations act = allocate_activations(workspace, input.n_tokens);
    if (activation_dtype(meta_.decoder.dtype) != LLAISYS_DTYPE_F32 &&
        (!row_indices_.defined() || row_indices_.size(0) < input.n_tokens)) {
        std::vector<int64_t> numbers(static_cast<size_t>(input.n_tokens));
        std::iota(numbers.begin(), numbers.end(), 0);
        stream.synchronize(); // queued work may read the old tensor
        row_indices_ =
            Tensor::create({input.n_tokens}, LLAISYS_DTYPE_I64, stream.type(), stream.device_id());
        row_indices_.load(numbers.data(), numbers.size() * sizeof(int64_t));
    }
    fuse(stream, input, act);
    project(stream, act);
    ops::Residual residual{act.residual, Tensor()};
    attend(stream, input, attention, act, &residual);
    ops::mlp_input(stream, &residual,
                   {weights_.mlp_norm_w->tensor, meta_.decoder.epsilon, act.normed},
                   {&gate_.weight, nullptr, &act.gate}, {&up_.weight, nullptr, &act.up});
    ops::add_product(stream, &residual, act.gate, down_.weight, nullptr, act.normed);
    finish(stream, input, act, &residual, output);
}

void DraftHead::fuse(const device::Stream &stream, const ModelInput &input,
                     const Activations &act) const {
    if (in_embed_.weight.defined()) {
        ops::linear_rows(stream, act.token, input.token_ids, in_embed_.weight);
    } else {
        ops::embedding(stream, act.token, input.token_ids, weights_.in_embed->tensor);
    }
    if (is(LLAISYS_DRAFT_HEAD_EAGLE3)) {
        if (input.embeddings.size(1) == spec().hidden_size) { // a hidden state of this head
            return ops::rearrange(stream, act.residual, input.embeddings);
        }
        const ops::LinearPart part{&feature_.weight, nullptr, &act.residual};
        return ops::linear(stream, to_activation_dtype(stream, input.embeddings, act.feature),
                           &part, 1);
    }
    const bool has_norms = is(LLAISYS_DRAFT_HEAD_MTP);
    if (has_norms) {
        norm(stream, act.token, act.token, weights_.token_norm_w);
        norm(stream, act.normed, input.embeddings, weights_.hidden_norm_w);
    }
    const Tensor &feature =
        has_norms ? act.normed : to_activation_dtype(stream, input.embeddings, act.feature);
    const ops::LinearPart token{&fuse_token_.weight, runtime::tensor_at(&weights_.fuse_b, 0),
                                &act.fused};
    const ops::LinearPart hidden{&fuse_hidden_.weight, nullptr, &act.residual};
    ops::linear(stream, act.token, &token, 1);
    ops::linear(stream, feature, &hidden, 1);
    ops::add(stream, act.residual, act.residual, act.fused);
}

void DraftHead::project(const device::Stream &stream, const Activations &act) const {
    const ops::LinearPart parts[] = {
        {&q_.weight, runtime::tensor_at(&weights_.attn_q_b, 0), &act.q},
        {&k_.weight, runtime::tensor_at(&weights_.attn_k_b, 0), &act.k},
        {&v_.weight, runtime::tensor_at(&weights_.attn_v_b, 0), &act.v}};
    if (is(LLAISYS_DRAFT_HEAD_EAGLE)) {
        return ops::linear(stream, to_activation_dtype(stream, act.residual, act.normed), parts, 3);
    }
    if (is(LLAISYS_DRAFT_HEAD_MTP)) {
        norm(stream, act.normed, act.residual, weights_.attn_norm_w);
        return ops::linear(stream, act.normed, parts, 3);
    }
    norm(stream, act.normed, act.residual, weights_.hidden_norm_w);
    ops::linear(stream, act.normed, parts, 3);
    norm(stream, act.token, act.token, weights_.token_norm_w);
    const ops::LinearPart token_parts[] = {{&q_token_.weight, nullptr, &act.q_token},
                                           {&k_token_.weight, nullptr, &act.k_token},
                                           {&v_token_.weight, nullptr, &act.v_token}};
    ops::linear(stream, act.token, token_parts, 3);
    ops::add(stream, act.q, act.q, act.q_token);
    ops::add(stream, act.k, act.k, act.k_token);
    ops::add(stream, act.v, act.v, act.v_token);
}

void DraftHead::attend(const device::Stream &stream, const ModelInput &input,
                       const AttentionMetadata &attention, const Activations &act,
                       ops::Residual *residual) const {
    const int64_t d = spec().kv.head_dim;
    const auto heads = [&](const Tensor &rows) {
        return rows.view({rows.size(0), rows.size(1) / d, d});
    };
    const ops::KvLayer &kv = attention.kv[0];
    const Tensor values = heads(act.v);
    ops::rope_both(stream, heads(act.q), heads(act.k), input.positions, spec().kv.inv_freq);
    ops::kv_store(stream, kv, heads(act.k), &values, attention.slots);
    ops::attention(stream, heads(act.attn_out), heads(act.q), kv, attention.lists_of(0), scale_);
    ops::add_product(stream, residual, act.attn_out, o_.weight, nullptr, act.normed);
}

void DraftHead::finish(const device::Stream &stream, const ModelInput &input,
                       const Activations &act, ops::Residual *residual,
                       ForwardOutput *output) const {
    if (residual->addend.defined()) {
        ops::add(stream, act.residual, residual->sum, residual->addend);
    }
    if (is(LLAISYS_DRAFT_HEAD_MTP)) {
        norm(stream, output->aux_hidden, act.residual, weights_.out_norm_w);
    } else {
        ops::rearrange(stream, output->aux_hidden, act.residual);
    }
    if (input.output_rows.defined()) {
        const Tensor *last = &act.normed;
        if (is(LLAISYS_DRAFT_HEAD_EAGLE)) {
            last = &to_activation_dtype(stream, act.residual, act.normed);
        } else {
            norm(stream, act.normed, act.residual, weights_.out_norm_w);
        }
        const ops::LinearPart part{&out_embed_.weight, nullptr, &output->logits};
        ops::linear(stream, *last, &part, 1, &input.output_rows);
    }
}

} // namespace llaisys::models
