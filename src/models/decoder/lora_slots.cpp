#include "models/decoder/lora_slots.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>

namespace llaisys::models {

namespace {

// Products of a layer that share one input: parts of one ops::lora call.
constexpr int64_t kQkvParts = 3, kGateUpParts = 2, kOneParts = 1;

} // namespace

LoraSlots::LoraSlots(const device::Stream *stream, const LoraShapes &shapes, int64_t n_layers,
                     DType dtype, int64_t n_slots, int64_t max_rank)
    : shapes_(shapes), layers_(size_t(n_layers)), ranks_(size_t(n_slots), 0), n_slots_(n_slots),
      max_rank_(max_rank) {
    for (Layer &layer : layers_) {
        for (size_t t = 0; t < layer.size(); ++t) {
            if (shapes[t].out_features == 0 || stream == nullptr) {
                continue;
            }
            layer[t] = ops::LoraWeight::create(*stream, dtype, n_slots, max_rank,
                                               shapes[t].out_features, shapes[t].in_features);
        }
    }
}

int64_t LoraSlots::bytes_of(const LoraShapes &shapes, int64_t n_layers, DType dtype,
                            int64_t n_slots, int64_t max_rank) {
    int64_t bytes = 0;
    for (const LoraShape &shape : shapes) {
        if (shape.out_features == 0) {
            continue;
        }
        bytes += ops::LoraWeight::bytes_of(dtype, n_slots, max_rank, shape.out_features,
                                           shape.in_features);
    }
    return n_layers * bytes;
}

int64_t LoraSlots::scratch_of(int64_t m, int64_t parts, LoraTarget target) const {
    return ops::lora_scratch(m, parts, shapes_[size_t(target)].in_features, max_rank_);
}

LoraInput LoraSlots::allocate(runtime::Workspace &workspace, int64_t n) const {
    LoraInput input;
    if (n_slots_ > 0) {
        const int64_t pending = std::max(scratch_of(n, kOneParts, LoraTarget::o),
                                         scratch_of(n, kOneParts, LoraTarget::down));
        const int64_t all = std::max({scratch_of(n, kQkvParts, LoraTarget::q),
                                      scratch_of(n, kGateUpParts, LoraTarget::gate), pending});
        input.scratch = workspace.allocate({all}, LLAISYS_DTYPE_F32);
        input.terms = workspace.allocate({pending}, LLAISYS_DTYPE_F32);
    }
    return input;
}

ops::Lora LoraSlots::product(size_t layer, std::initializer_list<LoraTarget> targets,
                             const LoraInput &input) const {
    ops::Lora lora;
    if (input.rows == nullptr) {
        return lora;
    }
    lora.rows = input.rows;
    lora.scratch = &input.scratch;
    lora.terms = &input.terms;
    for (const LoraTarget target : targets) {
        lora.weights[size_t(lora.n_parts++)] = &weight(layer, target);
    }
    return lora;
}

void LoraSlots::set(const device::Stream &stream, int64_t slot, const char *field, int64_t layer,
                    const Tensor &a, const Tensor &b, float scale) {
    require(slot >= 0 && slot < n_slots_, "slot must be in [0, ", n_slots_, "), got ", slot);
    require(layer >= 0 && layer < int64_t(layers_.size()), "layer must be in [0, ", layers_.size(),
            "), got ", layer);
    require(std::isfinite(scale), "scale must be finite, got ", scale);
    for (size_t t = 0; t < shapes_.size(); ++t) {
        if (std::strcmp(field, shapes_[t].field) == 0 && shapes_[t].out_features > 0) {
            require(a.ndim() != 2 || a.size(0) <= max_rank_, "the rank of a must be at most ",
                    max_rank_, ", got ", a.shape());
            layers_[size_t(layer)][t].set(stream, slot, a, b, scale);
            ranks_[size_t(slot)] = std::max(ranks_[size_t(slot)], int32_t(a.size(0)));
            return;
        }
    }
    fail(LLAISYS_ERROR_INVALID,
         "field must be a linear weight of a layer that LoRA supports, got '", field, "'");
}

void LoraSlots::clear(const device::Stream &stream, int64_t slot) {
    require(slot >= 0 && slot < n_slots_, "slot must be in [0, ", n_slots_, "), got ", slot);
    ranks_[size_t(slot)] = 0;
    for (const Layer &layer : layers_) {
        for (const ops::LoraWeight &weight : layer) {
            if (weight.defined()) {
                weight.clear(stream, slot);
            }
        }
    }
}

} // namespace llaisys::models
