// Weight slots: named tensor handles of a model's public slot table.
//
// A handle in a slot belongs to exactly one model. Several slots of the model may hold it (tied
// embeddings); it is destroyed when the last slot releases it.
#pragma once

#include "llaisys/tensor.h"
#include "tensor/handle.hpp"

#include <deque>
#include <memory>
#include <string>
#include <vector>

namespace llaisys::runtime {

// The tensor in slots[i]; null: none.
inline const Tensor *tensor_at(const llaisysTensor_t *slots, size_t i) {
    return slots != nullptr && slots[i] != nullptr ? &slots[i]->tensor : nullptr;
}

// Stores new_handle in *slot and destroys the previous handle unless it is the same or one of
// `others` holds it too.
void replace_slot(llaisysTensor_t *slot, llaisysTensor_t new_handle,
                  const std::vector<llaisysTensor_t *> &others = {});

// Destroys every distinct handle in the slots once and empties them.
void destroy_unique(const std::vector<llaisysTensor_t *> &slots);

// The fields of a model's slot table: names, shapes and slots. Owns the handles in the slots.
class WeightTable {
public:
    struct Field {
        std::string name;
        llaisysTensor_t *slots; // [count], inside the model's public struct
        int count;              // layers, or 1 for a global slot
        bool is_per_layer;
        bool is_optional;
        Shape shape;              // required of every tensor of the field
        std::vector<bool> layers; // which layers have the field; empty: all
        bool is_in(int layer) const { return layers.empty() || layers[size_t(layer)]; }
    };

    WeightTable(DeviceType device, int device_id) : device_(device), device_id_(device_id) {}
    ~WeightTable();
    WeightTable(const WeightTable &) = delete;
    WeightTable &operator=(const WeightTable &) = delete;

    void add_global(const std::string &name, llaisysTensor_t *slot, const Shape &shape,
                    bool is_optional = false);
    void add_layers(const std::string &name, llaisysTensor_t *slots, int n_layers,
                    const Shape &shape, bool is_optional = false);
    // The same for a field that some layers have, with empty slots owned by the table; returns their
    // stable address.
    llaisysTensor_t *add_layers(const std::string &name, const std::vector<bool> &layers,
                                const Shape &shape, bool is_optional = false);

    // Takes ownership of the handle, or throws and changes nothing.
    void replace(const std::string &field, int layer, llaisysTensor_t handle) {
        put(checked_slot(field, layer, handle), handle);
    }
    // The two halves of replace: checked_slot validates the tensor, put takes ownership.
    llaisysTensor_t *checked_slot(const std::string &field, int layer,
                                  llaisysTensor_t handle) const;
    void put(llaisysTensor_t *slot, llaisysTensor_t handle);

    // Throws naming field and layer of the first empty or invalid slot.
    void check_complete() const;
    // check_complete, then takes ownership of handles that were written into slots directly.
    void adopt_slots();

    // Whether a model owns the handle.
    static bool is_owned(const LlaisysTensor *handle) { return owner_of(handle) != nullptr; }

    // Replaces host tensors by copies on the stream's device, in all slots except these.
    void move_to_device(const device::Stream &stream,
                        const std::vector<llaisysTensor_t *> &but_these) const;

    // Changes whenever a slot gets another handle.
    uint64_t fingerprint() const;

    std::string slot_name(const llaisysTensor_t *slot) const; // "weight attn_q_w of layer 3"

    DeviceType device() const { return device_; }

private:
    const Field &field(const std::string &name) const; // throws, listing the names
    void check(const Field &field, int layer, const LlaisysTensor *handle) const;
    std::vector<llaisysTensor_t *> all_slots() const;
    bool holds(const LlaisysTensor *handle) const;
    // The live table that owns the handle and still has it in a slot; nullptr: none.
    static const WeightTable *owner_of(const LlaisysTensor *handle);
    bool is_owned_elsewhere(const LlaisysTensor *handle) const;
    // Clears a slot that holds a handle of another table.
    void release_foreign(llaisysTensor_t *slot) const;

    DeviceType device_;
    int device_id_;
    std::vector<Field> fields_;
    std::deque<std::vector<llaisysTensor_t>> own_slots_;
    // Target of the handles' weak owner pointers; owns nothing.
    std::shared_ptr<const WeightTable> self_{this, [](const WeightTable *) {}};
};

} // namespace llaisys::runtime
