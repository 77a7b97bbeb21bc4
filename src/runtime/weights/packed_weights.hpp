// Packed weights: converted to the layout of the device's kernels when their slot is filled.
//
// The packed copy replaces the original: an owned tensor is released, the pages of a mapped one are
// dropped. Slots with the same handle share one copy, so that a tied embedding reads the rows of
// the head.
#pragma once

#include "ops/linear/op.hpp"
#include "ops/moe/op.hpp"
#include "runtime/weights/weights.hpp"

#include <vector>

namespace llaisys::runtime {

// The packed weight of a slot, and the handle it was packed from.
struct PackedWeight {
    ops::LinearWeight weight;   // not defined(): not packed, or an embedding read as a tensor
    uint64_t serial = 0;        // of the handle; 0: none
    ops::ExpertWeights experts; // of a slot of experts, instead of weight
    bool defined() const { return weight.defined() || experts.defined(); }
};

class PackedWeights {
public:
    // The table outlives this.
    explicit PackedWeights(WeightTable &table) : table_(table) {}

    // *slot is the weight of a product. n_experts above 0: the weights of so many experts, stacked
    // along the rows. The pointers must stay valid.
    void add(llaisysTensor_t *slot, PackedWeight *packed, int64_t n_experts = 0) {
        slots_.push_back({slot, packed, false, nullptr, 0, n_experts});
    }
    // The same for a weight of out_features rows, appended to a fused buffer.
    void add(llaisysTensor_t *slot, PackedWeight *packed, ops::LinearBuffer *buffer,
             int64_t out_features) {
        slots_.push_back({slot, packed, false, buffer, buffer->rows, 0});
        buffer->rows += out_features;
    }
    // *slot is an embedding. It is packed when a product uses the same handle (tied) or when its
    // dtype is quantised; otherwise it stays a tensor.
    void add_lookup(llaisysTensor_t *slot, PackedWeight *packed) {
        slots_.push_back({slot, packed, true, nullptr, 0, 0});
    }

    // WeightTable::replace, and packs the tensor at once. Changes nothing when it throws.
    void replace(const device::Stream &stream, const char *field, int layer,
                 llaisysTensor_t handle);

    // Adopts slots that the caller wrote directly, packs weights that are not packed, and moves
    // other tensors to the stream's device. Throws naming a missing or invalid weight. Returns at
    // once when no slot has changed.
    void prepare(const device::Stream &stream);
    // Changes when the memory of the weights may have changed.
    uint64_t version() const { return prepared_; }

private:
    struct Slot {
        llaisysTensor_t *slot;
        PackedWeight *packed;
        bool is_lookup;
        ops::LinearBuffer *buffer; // null: none
        int64_t first_row;
        int64_t n_experts; // 0: one weight
    };
    void pack(const device::Stream &stream, const Slot &slot, llaisysTensor_t handle);

    WeightTable &table_;
    std::vector<Slot> slots_;
    uint64_t prepared_ = 0; // fingerprint of the table that the packed weights belong to
};

// Adds fields of several layers to a table, and the packed weights of those that are products. The
// objects must outlive their slots.
template <typename Layer> class LayerSlots {
public:
    // which [layers->size()]: the layers that have the fields.
    LayerSlots(WeightTable *table, PackedWeights *packed, std::vector<Layer> *layers,
               std::vector<bool> which)
        : table_(*table), packed_(*packed), layers_(*layers), which_(std::move(which)) {}

    void add(const char *name, llaisysTensor_t **slots, const Shape &shape,
             bool is_optional = false) {
        *slots = table_.add_layers(name, which_, shape, is_optional);
    }
    // buffer: of a weight that is a part of a fused buffer; n_experts: as in PackedWeights::add.
    void add_linear(const char *name, llaisysTensor_t **slots, const Shape &shape,
                    PackedWeight Layer::*packed, ops::LinearBuffer Layer::*buffer = nullptr,
                    int64_t n_experts = 0) {
        add(name, slots, shape);
        for (size_t i = 0; i < layers_.size(); ++i) {
            PackedWeight *weight = &(layers_[i].*packed);
            if (which_[i] && buffer != nullptr) {
                packed_.add(*slots + i, weight, &(layers_[i].*buffer), shape[0]);
            } else if (which_[i]) {
                packed_.add(*slots + i, weight, n_experts);
            }
        }
    }

private:
    WeightTable &table_;
    PackedWeights &packed_;
    std::vector<Layer> &layers_;
    std::vector<bool> which_;
};

} // namespace llaisys::runtime
