// The weights of a decoder: slots, and LoRA adapters.
#include "models/decoder/decoder.hpp"

#include <algorithm>
#include <cstring>

namespace llaisys::models {

void DecoderModel::register_slots() {
    const int64_t hidden = int64_t(meta_.hs);
    const int64_t q_size = int64_t(meta_.nh * meta_.dh);
    const int64_t kv_size = int64_t(meta_.nkvh * meta_.dh);
    const Shape embedding{int64_t(meta_.voc), hidden};
    const bool norms_residual = meta_.norm_position == LLAISYS_NORM_RESIDUAL;
    if (is_first_stage_) {
        table_.add_global("in_embed", &weights_.in_embed, embedding);
        packed_.add_lookup(&weights_.in_embed, &in_embed_);
        if (meta_.has_positions != 0) {
            table_.add_global("pos_embed", &weights_.pos_embed, {int64_t(meta_.maxseq), hidden});
        }
        if (meta_.n_token_types > 0) {
            table_.add_global("type_embed", &weights_.type_embed,
                              {int64_t(meta_.n_token_types), hidden});
        }
        if (meta_.has_embed_norm != 0) {
            table_.add_global("embed_norm_w", &weights_.embed_norm_w, {hidden});
            table_.add_global("embed_norm_b", &weights_.embed_norm_b, {hidden}, true);
        }
    }
    if (meta_.has_no_head == 0 && is_last_stage_) {
        Shape head_shape = embedding;
        if (head_columns_ > 0) {
            const int64_t first = group_->rank() * head_columns_;
            head_shape[0] = std::min(head_columns_, embedding[0] - first);
        }
        table_.add_global("out_embed", &weights_.out_embed, head_shape);
        packed_.add(&weights_.out_embed, &head_);
    }
    if (is_last_stage_) {
        table_.add_global("out_norm_w", &weights_.out_norm_w, {hidden}, norms_residual);
        table_.add_global("out_norm_b", &weights_.out_norm_b, {hidden}, true);
    }

    runtime::LayerSlots<Layer> slots(&table_, &packed_, &layers_,
                                     std::vector<bool>(layers_.size(), true));
    const bool has_norms_before = meta_.norm_position != LLAISYS_NORM_AFTER && !norms_residual;
    const bool has_norms_after = meta_.norm_position != LLAISYS_NORM_BEFORE;
    slots.add("attn_norm_w", &weights_.attn_norm_w, {hidden}, !has_norms_before);
    slots.add("attn_norm_b", &weights_.attn_norm_b, {hidden}, true);
    slots.add("attn_post_norm_w", &weights_.attn_post_norm_w, {hidden}, !has_norms_after);
    slots.add("attn_post_norm_b", &weights_.attn_post_norm_b, {hidden}, true);
    slots.add_linear("attn_o_w", &weights_.attn_o_w, {hidden, int64_t(meta_.nh) * value_dim()},
                     &Layer::o);
    slots.add("attn_o_b", &weights_.attn_o_b, {hidden}, true);
    if (latent_.is_used()) {
        latent_.register_slots(&weights_, &table_, &packed_);
    } else {
        slots.add_linear("attn_q_w", &weights_.attn_q_w, {q_size, hidden}, &Layer::q, &Layer::qkv);
        slots.add("attn_q_b", &weights_.attn_q_b, {q_size}, true);
        slots.add_linear("attn_k_w", &weights_.attn_k_w, {kv_size, hidden}, &Layer::k, &Layer::qkv);
        slots.add("attn_k_b", &weights_.attn_k_b, {kv_size}, true);
        slots.add_linear("attn_v_w", &weights_.attn_v_w, {kv_size, hidden}, &Layer::v, &Layer::qkv);
        slots.add("attn_v_b", &weights_.attn_v_b, {kv_size}, true);
        const bool has_row_norms = meta_.has_row_norms != 0;
        const bool are_norms_optional = spec().type != LLAISYS_MODEL_TYPE_QWEN3 && !has_row_norms;
        const int64_t head = int64_t(meta_.dh);
        slots.add("attn_q_norm_w", &weights_.attn_q_norm_w, {has_row_norms ? q_size : head},
                  are_norms_optional);
        slots.add("attn_k_norm_w", &weights_.attn_k_norm_w, {has_row_norms ? kv_size : head},
                  are_norms_optional);
    }
    slots.add("attn_sinks_w", &weights_.attn_sinks_w, {int64_t(meta_.nh)}, meta_.has_sinks == 0);
    slots.add("mlp_norm_w", &weights_.mlp_norm_w, {hidden},
              !has_norms_before || meta_.is_parallel != 0);
    slots.add("mlp_norm_b", &weights_.mlp_norm_b, {hidden}, true);
    slots.add("mlp_post_norm_w", &weights_.mlp_post_norm_w, {hidden}, !has_norms_after);
    slots.add("mlp_post_norm_b", &weights_.mlp_post_norm_b, {hidden}, true);
    mlp_.register_slots(&weights_, &table_, &packed_);
}

LoraShapes DecoderModel::lora_shapes() const {
    const int64_t hidden = int64_t(meta_.hs);
    const int64_t q_size = int64_t(meta_.nh * meta_.dh);
    const int64_t kv_size = int64_t(meta_.nkvh * meta_.dh);
    const int64_t inner = int64_t(meta_.di);
    const int64_t gate = mlp_.has_gate() ? inner : 0;
    return {{{"attn_q_w", q_size, hidden},
             {"attn_k_w", kv_size, hidden},
             {"attn_v_w", kv_size, hidden},
             {"attn_o_w", hidden, q_size},
             {"mlp_gate_w", gate, hidden},
             {"mlp_up_w", inner, hidden},
             {"mlp_down_w", inner > 0 ? hidden : 0, inner}}};
}

int64_t DecoderModel::lora_bytes(int64_t n_slots, int64_t max_rank) const {
    return LoraSlots::bytes_of(lora_shapes(), int64_t(meta_.nlayer), meta_.dtype, n_slots,
                               max_rank);
}

void DecoderModel::reserve_lora(const device::Stream *stream, int64_t n_slots, int64_t max_rank) {
    if (n_slots > 0 && latent_.is_used()) {
        fail(LLAISYS_ERROR_UNSUPPORTED, "LoRA adapters are not supported with latent attention");
    }
    lora_ = LoraSlots(); // release the memory first
    if (n_slots > 0) {
        lora_ =
            LoraSlots(stream, lora_shapes(), int64_t(meta_.nlayer), meta_.dtype, n_slots, max_rank);
    }
}

void DecoderModel::set_lora(const device::Stream &stream, int64_t slot, const char *field,
                            int64_t layer, const Tensor &a, const Tensor &b, float scale) {
    const bool is_mlp = std::strncmp(field, "mlp_", 4) == 0;
    require(!is_mlp || layer < 0 || layer >= int64_t(layers_.size()) ||
                !mlp_.has_experts(size_t(layer)),
            "field must not be ", field, " in layer ", layer, ", whose MLP has experts");
    lora_.set(stream, slot, field, layer, a, b, scale);
}

} // namespace llaisys::models
