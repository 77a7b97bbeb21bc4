#include "models/hyper_params.hpp"

#include <cmath>
#include <vector>

namespace llaisys::models {

namespace {

constexpr double kPi = 3.14159265358979323846;

void check_size(const char *name, size_t value, size_t limit) {
    require(value >= 1 && value <= limit, "meta.", name, " must be in [1, ", limit, "], got ",
            value);
}

void check_positive(const char *name, float value) {
    require(std::isfinite(value) && value > 0, "meta.", name, " must be finite and above 0, got ",
            value);
}

// Llama 3: wavelengths beyond the original context are stretched by the factor, short ones are
// kept, and those between move smoothly from one to the other.
double llama3_frequency(double frequency, const LlaisysDecoderMeta &meta) {
    const double original = double(meta.rope_original_maxseq);
    const double wavelength = 2 * kPi / frequency;
    if (wavelength < original / meta.rope_high_freq_factor) {
        return frequency;
    }
    if (wavelength > original / meta.rope_low_freq_factor) {
        return frequency / meta.rope_factor;
    }
    const double ramp = (original / wavelength - meta.rope_low_freq_factor) /
                        (double(meta.rope_high_freq_factor) - meta.rope_low_freq_factor);
    return (1 - ramp) * frequency / meta.rope_factor + ramp * frequency;
}

} // namespace

void check_hyper_params(const LlaisysDecoderMeta &meta) {
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
    require(meta.rope_scaling >= LLAISYS_ROPE_PLAIN && meta.rope_scaling <= LLAISYS_ROPE_LLAMA3,
            "meta.rope_scaling must be in [0, 2], got ", meta.rope_scaling);
    if (meta.rope_scaling != LLAISYS_ROPE_PLAIN) {
        check_positive("rope_factor", meta.rope_factor);
    }
    if (meta.rope_scaling == LLAISYS_ROPE_LLAMA3) {
        check_positive("rope_low_freq_factor", meta.rope_low_freq_factor);
        check_positive("rope_high_freq_factor", meta.rope_high_freq_factor);
        require(meta.rope_high_freq_factor > meta.rope_low_freq_factor,
                "meta.rope_high_freq_factor must be above meta.rope_low_freq_factor, got ",
                meta.rope_high_freq_factor, " and ", meta.rope_low_freq_factor);
        require(meta.rope_original_maxseq > 0, "meta.rope_original_maxseq must be above 0, got ",
                meta.rope_original_maxseq);
    }
}

std::vector<int64_t> windows_of(const LlaisysDecoderMeta &meta) {
    if (meta.layer_windows != nullptr) {
        return {meta.layer_windows, meta.layer_windows + meta.nlayer};
    }
    return std::vector<int64_t>(meta.nlayer, meta.sliding_window);
}

LlaisysDecoderMeta share_of(const LlaisysDecoderMeta &meta, const ModelSite &site) {
    const size_t ranks = size_t(site.group->size());
    const auto check = [&](const char *name, size_t value) {
        require(value % ranks == 0, "meta.", name,
                " must be divisible by the number of ranks: tp_size=", ranks,
                " tp_rank=", site.group->rank(), " global_", name, "=", value, " local_", name, "=",
                value / ranks, " device_id=", site.device_id);
    };
    check("nh", meta.nh);
    check("nkvh", meta.nkvh);
    check("di", meta.di);
    LlaisysDecoderMeta local = meta;
    local.nh = meta.nh / ranks;
    local.nkvh = meta.nkvh / ranks;
    local.di = meta.di / ranks;
    return local;
}

Tensor rotary_frequencies(const LlaisysDecoderMeta &meta, DeviceType device, int device_id) {
    std::vector<float> frequencies(meta.dh / 2);
    for (size_t i = 0; i < frequencies.size(); ++i) {
        double frequency = std::pow(double(meta.theta), -2.0 * double(i) / double(meta.dh));
        if (meta.rope_scaling == LLAISYS_ROPE_LINEAR) {
            frequency /= meta.rope_factor;
        } else if (meta.rope_scaling == LLAISYS_ROPE_LLAMA3) {
            frequency = llama3_frequency(frequency, meta);
        }
        frequencies[i] = float(frequency);
    }
    Tensor tensor =
        Tensor::create({int64_t(frequencies.size())}, LLAISYS_DTYPE_F32, device, device_id);
    tensor.load(frequencies.data(), frequencies.size() * sizeof(float));
    return tensor;
}

} // namespace llaisys::models
