#include "models/mock/mock.hpp"

#include "models/hyper_params.hpp"
#include "ops/embedding/op.hpp"
#include "ops/kv_store/op.hpp"
#include "ops/rearrange/op.hpp"
#include "ops/rope/op.hpp"

namespace llaisys::models {

MockModel::MockModel(const LlaisysDecoderMeta &meta, const ModelPlacement &placement)
    : SlotModel(spec_of(LLAISYS_MODEL_TYPE_MOCK, check_hyper_params(meta), placement), placement),
      meta_(without_pointers(meta)), scale_(attention_scale(meta)) {
    if (placement.group->size() != 1) {
        fail(LLAISYS_ERROR_UNSUPPORTED, "a mock model runs on one rank, got ",
             placement.group->size());
    }
    require(meta.nlayer == 1, "meta.nlayer must be 1 for a mock model, got ", meta.nlayer);
    require(meta.nh * meta.dh == meta.hs, "meta.hs must be nh * dh for a mock model, got ",
            meta.hs);
    table_.add_global("in_embed", &weights_.in_embed, {int64_t(meta.voc), int64_t(meta.hs)});
    packed_.add(&weights_.in_embed, &embed_);
}

MockModel::Activations MockModel::allocate_activations(runtime::Workspace &workspace,
                                                       int64_t n) const {
    const Shape shape{n, int64_t(meta_.nh), int64_t(meta_.dh)};
    Activations act;
    act.x = workspace.allocate(shape, LLAISYS_DTYPE_F32);
    act.q = workspace.allocate(shape, LLAISYS_DTYPE_F32);
    act.attn_out = workspace.allocate(shape, LLAISYS_DTYPE_F32);
    return act;
}

int64_t MockModel::workspace_bytes(int64_t n, int64_t) const {
    runtime::Workspace workspace = runtime::Workspace::measuring();
    allocate_activations(workspace, n);
    return workspace.used();
}

void MockModel::forward(const device::Stream &stream, runtime::Workspace &workspace,
                        const ModelInput &input, const AttentionMetadata &attention,
                        ForwardOutput *output) {
    const int64_t n = input.n_tokens;
    const int64_t kv_heads = spec().kv.n_heads;
    const ops::KvLayer &kv = attention.kv[0];

    const Activations act = allocate_activations(workspace, n);
    const Tensor &x = act.x;
    const Tensor &q = act.q;
    if (input.token_ids.defined()) {
        ops::linear_rows(stream, x.view({n, spec().hidden_size}), input.token_ids, embed_.weight);
    } else {
        ops::rearrange(stream, x.view({n, spec().hidden_size}), input.embeddings);
    }
    ops::rope(stream, q, x, input.positions, spec().kv.inv_freq);
    const Tensor v = x.slice(1, 0, kv_heads);
    ops::kv_store(stream, kv, q.slice(1, 0, kv_heads), &v, attention.slots);
    ops::attention(stream, act.attn_out, q, kv, attention.lists_of(0), scale_);
    if (input.hidden_rows.defined()) {
        ops::embedding(stream, output->hidden, input.hidden_rows,
                       act.attn_out.view({n, spec().hidden_size}));
    }
    if (input.output_rows.defined()) {
        const ops::LinearPart head{&embed_.weight, nullptr, &output->logits};
        ops::linear(stream, act.attn_out.view({n, spec().hidden_size}), &head, 1,
                    &input.output_rows);
    }
}

} // namespace llaisys::models
