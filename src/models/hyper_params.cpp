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

// Attention window of each layer; 0: none.
std::vector<int64_t> windows_of(const LlaisysDecoderMeta &meta) {
    if (meta.layer_windows != nullptr) {
        return {meta.layer_windows, meta.layer_windows + meta.nlayer};
    }
    return std::vector<int64_t>(meta.nlayer, meta.sliding_window);
}

// Inverse frequencies, f32 [dh / 2], divided by rope_divisors.
Tensor rotary_frequencies(const LlaisysDecoderMeta &meta, const ModelPlacement &placement) {
    std::vector<float> frequencies(meta.dh / 2);
    for (size_t i = 0; i < frequencies.size(); ++i) {
        const double divisor = meta.rope_divisors != nullptr ? meta.rope_divisors[i] : 1.0;
        const double frequency =
            std::pow(double(meta.theta), -2.0 * double(i) / double(meta.dh)) / divisor;
        frequencies[i] = float(frequency);
    }
    Tensor tensor = Tensor::create({int64_t(frequencies.size())}, LLAISYS_DTYPE_F32,
                                   placement.device, placement.device_id);
    tensor.load(frequencies.data(), frequencies.size() * sizeof(float));
    return tensor;
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
    for (size_t i = 0; meta.rope_divisors != nullptr && i < meta.dh / 2; ++i) {
        require(std::isfinite(meta.rope_divisors[i]) && meta.rope_divisors[i] > 0,
                "meta.rope_divisors[", i, "] must be finite and above 0, got ",
                meta.rope_divisors[i]);
    }
    if (meta.rope_attention_factor != 0) {
        check_positive("rope_attention_factor", meta.rope_attention_factor);
    }
    return meta;
}

LlaisysDecoderMeta without_pointers(LlaisysDecoderMeta meta) {
    meta.layer_windows = nullptr;
    meta.rope_divisors = nullptr;
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
    const bool has_copies =
        placement.replicate_kv_heads && meta.nkvh < ranks && ranks % meta.nkvh == 0;
    if (!has_copies) {
        check("nkvh", meta.nkvh);
    }
    check("di", meta.di);
    LlaisysDecoderMeta local = meta;
    local.nh = meta.nh / ranks;
    local.nkvh = has_copies ? 1 : meta.nkvh / ranks;
    local.di = meta.di / ranks;
    return local;
}

float attention_scale(const LlaisysDecoderMeta &meta) {
    const float factor = meta.rope_attention_factor != 0 ? meta.rope_attention_factor : 1.0f;
    return 1.0f / std::sqrt(float(meta.dh)) * (factor * factor);
}

ModelSpec spec_of(LlaisysModelType type, const LlaisysDecoderMeta &meta,
                  const ModelPlacement &placement) {
    ModelSpec spec;
    spec.type = type;
    spec.kv = {int64_t(meta.nlayer), int64_t(meta.nkvh), int64_t(meta.dh), meta.dtype,
               rotary_frequencies(meta, placement)};
    spec.vocabulary = spec.input_vocabulary = int64_t(meta.voc);
    spec.hidden_size = int64_t(meta.hs);
    spec.max_positions = int64_t(meta.maxseq);
    spec.windows = windows_of(meta);
    return spec;
}

} // namespace llaisys::models
