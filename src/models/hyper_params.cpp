#include "models/hyper_params.hpp"

#include <cmath>
#include <vector>

namespace llaisys::models {

namespace {

void check_size(const char *name, size_t value, size_t limit) {
    require(value >= 1 && value <= limit, "meta.", name, " must be in [1, ", limit, "], got ",
            value);
}

void check_positive(const char *name, float value) {
    require(std::isfinite(value) && value > 0, "meta.", name, " must be finite and above 0, got ",
            value);
}

void check_optional(const char *name, float value) {
    require(std::isfinite(value) && value >= 0, "meta.", name,
            " must be finite and at least 0, got ", value);
}

void check_kind(const char *name, int32_t value, int32_t limit) {
    require(value >= 0 && value <= limit, "meta.", name, " must be in [0, ", limit, "], got ",
            value);
}

// The fields after rope_attention_factor.
void check_variants(const LlaisysDecoderMeta &meta) {
    check_optional("rope_factor", meta.rope_factor);
    check_optional("attention_scale", meta.attention_scale);
    check_optional("attention_soft_cap", meta.attention_soft_cap);
    check_optional("logit_scale", meta.logit_scale);
    check_optional("logit_soft_cap", meta.logit_soft_cap);
    check_optional("embedding_scale", meta.embedding_scale);
    check_optional("residual_scale", meta.residual_scale);
    check_kind("norm_kind", meta.norm_kind, LLAISYS_NORM_LAYER);
    check_kind("norm_position", meta.norm_position, LLAISYS_NORM_RESIDUAL);
    check_kind("mlp_kind", meta.mlp_kind, LLAISYS_MLP_GELU_ERF);
    check_kind("is_parallel", meta.is_parallel, 1);
    check_kind("has_row_norms", meta.has_row_norms, 1);
    check_kind("has_sinks", meta.has_sinks, 1);
    require(meta.is_parallel == 0 || meta.norm_position == LLAISYS_NORM_BEFORE,
            "meta.is_parallel needs norm_position 0, got ", meta.norm_position);
    check_kind("is_bidirectional", meta.is_bidirectional, 1);
    check_kind("has_no_head", meta.has_no_head, 1);
    check_kind("has_positions", meta.has_positions, 1);
    check_kind("has_embed_norm", meta.has_embed_norm, 1);
    require(meta.n_token_types <= 256, "meta.n_token_types must be at most 256, got ",
            meta.n_token_types);
    const size_t frequencies = meta.layer_inv_freqs != nullptr ? meta.nlayer * (meta.dh / 2) : 0;
    for (size_t i = 0; i < frequencies; ++i) {
        require(std::isfinite(meta.layer_inv_freqs[i]), "meta.layer_inv_freqs[", i,
                "] must be finite, got ", meta.layer_inv_freqs[i]);
    }
}

void check_latent(const LlaisysDecoderMeta &meta) {
    if (meta.kv_rank == 0) {
        return;
    }
    constexpr size_t kMostRank = 1 << 16;
    check_size("kv_rank", meta.kv_rank, 1024);
    check_size("rope_dim", meta.rope_dim, meta.dh - 1);
    check_size("v_dim", meta.v_dim, 1024);
    require(meta.rope_dim % 2 == 0, "meta.rope_dim must be even, got ", meta.rope_dim);
    require(meta.q_rank <= kMostRank, "meta.q_rank must be at most ", kMostRank, ", got ",
            meta.q_rank);
    check_positive("latent_epsilon", meta.latent_epsilon);
    require(meta.nkvh == 1, "meta.nkvh must be 1 with meta.kv_rank, got ", meta.nkvh);
    require(meta.layer_inv_freqs == nullptr && meta.has_row_norms == 0 &&
                meta.attention_soft_cap == 0 && meta.has_sinks == 0,
            "meta.kv_rank does not support layer_inv_freqs, has_row_norms, attention_soft_cap and "
            "has_sinks");
}

void check_moe(const LlaisysDecoderMeta &meta) {
    if (meta.n_experts == 0) {
        return;
    }
    require(meta.is_parallel == 0, "meta.is_parallel is not supported with experts");
    check_size("n_experts", meta.n_experts, 4096);
    check_size("n_experts_used", meta.n_experts_used, meta.n_experts);
    check_size("moe_di", meta.moe_di, size_t(1) << 22);
    require(meta.shared_di <= size_t(1) << 22, "meta.shared_di must be at most ", size_t(1) << 22,
            ", got ", meta.shared_di);
    require(meta.moe_has_shared_gate == 0 || meta.shared_di > 0,
            "meta.moe_has_shared_gate needs meta.shared_di");
    for (const float value : {meta.moe_scale, meta.moe_limit, meta.moe_alpha}) {
        require(std::isfinite(value) && value >= 0,
                "meta.moe_scale, moe_limit and moe_alpha must be finite and at least 0, got ",
                value);
    }
}

// Attention window of each layer; 0: none.
std::vector<int64_t> windows_of(const LlaisysDecoderMeta &meta) {
    if (meta.layer_windows != nullptr) {
        return {meta.layer_windows, meta.layer_windows + meta.nlayer};
    }
    return std::vector<int64_t>(meta.nlayer, meta.sliding_window);
}

Tensor float_tensor(const float *values, const Shape &shape, const ModelPlacement &placement) {
    Tensor tensor = placement.is_described ? Tensor::create(shape, LLAISYS_DTYPE_F32)
                                           : Tensor::create(shape, LLAISYS_DTYPE_F32,
                                                            placement.device, placement.device_id);
    tensor.load(values, size_t(tensor.elements()) * sizeof(float));
    return tensor;
}

// Values of a head that RoPE rotates, those with frequency 0 included.
size_t rotary_dim(const LlaisysDecoderMeta &meta) {
    return meta.kv_rank > 0 ? meta.rope_dim : meta.dh;
}

// Inverse frequencies of d = rotary_dim values: f32 [nlayer, d / 2] from layer_inv_freqs, or
// [d / 2] divided by rope_divisors.
Tensor rotary_frequencies(const LlaisysDecoderMeta &meta, const ModelPlacement &placement) {
    if (meta.layer_inv_freqs != nullptr) {
        return float_tensor(meta.layer_inv_freqs, {int64_t(meta.nlayer), int64_t(meta.dh / 2)},
                            placement);
    }
    const size_t d = rotary_dim(meta);
    std::vector<float> frequencies(d / 2);
    for (size_t i = 0; i < frequencies.size(); ++i) {
        const double divisor = meta.rope_divisors != nullptr ? meta.rope_divisors[i] : 1.0;
        const double frequency =
            std::pow(double(meta.theta), -2.0 * double(i) / double(d)) / divisor;
        frequencies[i] = float(frequency);
    }
    return float_tensor(frequencies.data(), {int64_t(frequencies.size())}, placement);
}

} // namespace

const LlaisysDecoderMeta &check_hyper_params(const LlaisysDecoderMeta &meta) {
    require(is_activation(meta.dtype), "meta.dtype must be f32, f16 or bf16, got ",
            name_of(meta.dtype));
    check_size("nlayer", meta.nlayer, 1024);
    check_size("hs", meta.hs, size_t(1) << 20);
    check_size("nh", meta.nh, 4096);
    check_size("nkvh", meta.nkvh, 4096);
    check_size("dh", meta.dh, 1024);
    check_size("di", meta.di, size_t(1) << 22);
    check_size("maxseq", meta.maxseq, size_t(1) << 27);
    check_size("voc", meta.voc, size_t(1) << 24);
    require(meta.nh % meta.nkvh == 0, "meta.nh must be a multiple of meta.nkvh, got ", meta.nh,
            " and ", meta.nkvh);
    require(meta.dh % 2 == 0, "meta.dh must be even, got ", meta.dh);
    check_positive("epsilon", meta.epsilon);
    check_positive("theta", meta.theta);
    require(meta.sliding_window >= 0, "meta.sliding_window must not be negative, got ",
            meta.sliding_window);
    for (size_t i = 0; meta.layer_windows != nullptr && i < meta.nlayer; ++i) {
        require(meta.layer_windows[i] >= 0, "meta.layer_windows[", i,
                "] must not be negative, got ", meta.layer_windows[i]);
    }
    check_latent(meta);
    for (size_t i = 0; meta.rope_divisors != nullptr && i < rotary_dim(meta) / 2; ++i) {
        require(std::isfinite(meta.rope_divisors[i]) && meta.rope_divisors[i] > 0,
                "meta.rope_divisors[", i, "] must be finite and above 0, got ",
                meta.rope_divisors[i]);
    }
    if (meta.rope_attention_factor != 0) {
        check_positive("rope_attention_factor", meta.rope_attention_factor);
    }
    check_variants(meta);
    check_moe(meta);
    if (meta.is_bidirectional != 0) {
        for (const int64_t window : windows_of(meta)) {
            require(window == 0, "meta.is_bidirectional allows no attention window, got ", window);
        }
    }
    return meta;
}

LlaisysDecoderMeta without_pointers(LlaisysDecoderMeta meta) {
    meta.layer_windows = nullptr;
    meta.rope_divisors = nullptr;
    meta.layer_inv_freqs = nullptr;
    meta.moe_layers = nullptr;
    return meta;
}

LlaisysDecoderMeta shard_meta(const LlaisysDecoderMeta &meta, const ModelPlacement &placement) {
    const size_t ranks = size_t(placement.group->size());
    const auto check = [&](const char *name, size_t value) {
        require(value % ranks == 0, "meta.", name,
                " must be divisible by the number of ranks: tp_size=", ranks,
                " tp_rank=", placement.group->rank(), " global_", name, "=", value, " local_", name,
                "=", value / ranks, " device_id=", placement.device_id);
    };
    check("nh", meta.nh);
    const bool has_copies = meta.kv_rank > 0 || (placement.replicate_kv_heads &&
                                                 meta.nkvh < ranks && ranks % meta.nkvh == 0);
    if (!has_copies) {
        check("nkvh", meta.nkvh);
    }
    check("di", meta.di);
    check("moe_di", meta.moe_di);
    check("shared_di", meta.shared_di);
    require(meta.has_row_norms == 0 || ranks == 1,
            "meta.has_row_norms is not supported with tensor parallelism, tp_size=", ranks);
    LlaisysDecoderMeta local = meta;
    local.nh = meta.nh / ranks;
    local.nkvh = has_copies ? 1 : meta.nkvh / ranks;
    local.di = meta.di / ranks;
    local.moe_di = meta.moe_di / ranks;
    local.shared_di = meta.shared_di / ranks;
    return local;
}

float attention_scale(const LlaisysDecoderMeta &meta) {
    const float factor = or_one(meta.rope_attention_factor);
    const float scale =
        meta.attention_scale != 0 ? meta.attention_scale : 1.0f / std::sqrt(float(meta.dh));
    return scale * (factor * factor);
}

ModelSpec spec_of(LlaisysModelType type, const LlaisysDecoderMeta &meta,
                  const ModelPlacement &placement) {
    ModelSpec spec;
    spec.type = type;
    spec.kv = {int64_t(meta.nlayer),
               int64_t(meta.nkvh),
               int64_t(meta.dh),
               meta.dtype,
               rotary_frequencies(meta, placement),
               0};
    if (meta.kv_rank > 0) {
        spec.kv.head_dim = int64_t(meta.kv_rank + meta.rope_dim);
        spec.kv.value_dim = int64_t(meta.kv_rank);
    }
    spec.input_vocabulary = int64_t(meta.voc);
    const bool has_logits = meta.has_no_head == 0 && placement.is_last_stage();
    spec.vocabulary = has_logits ? spec.input_vocabulary : 1;
    spec.token_types = int64_t(meta.n_token_types);
    spec.is_bidirectional = meta.is_bidirectional != 0;
    spec.hidden_size = int64_t(meta.hs);
    spec.max_positions = int64_t(meta.maxseq);
    spec.windows = windows_of(meta);
    return spec;
}

} // namespace llaisys::models
