// Weight slots: named places for tensor handles inside a model's public slot table.
//
// A handle in a slot belongs to the model, and to one model alone. It may stand in several of its
// slots (tied embeddings); it is destroyed once, when its last slot lets it go.
#pragma once

#include "llaisys/tensor.h"
#include "tensor/handle.hpp"

#include <deque>
#include <memory>
#include <string>
#include <vector>

namespace llaisys::runtime {

// Puts new_handle into *slot and destroys what was there, unless it is the same handle or one of
// `others` holds it too.
void replace_slot(llaisysTensor_t *slot, llaisysTensor_t new_handle,
                  const std::vector<llaisysTensor_t *> &others = {});

// Destroys every distinct handle in the slots once and empties them.
void destroy_unique(const std::vector<llaisysTensor_t *> &slots);

// The fields of one model's slot table: their names, shapes and slots. Owns what is in the slots.
class WeightTable {
public:
    struct Field {
        std::string name;
        llaisysTensor_t *slots; // [count], inside the model's public struct
        int count;              // layers, or 1 for a global slot
        bool is_per_layer;
        bool is_optional;
        Shape shape; // that every tensor of the field must have
    };

    WeightTable(DeviceType device, int device_id) : device_(device), device_id_(device_id) {}
    ~WeightTable();
    WeightTable(const WeightTable &) = delete;
    WeightTable &operator=(const WeightTable &) = delete;

    void add_global(const std::string &name, llaisysTensor_t *slot, const Shape &shape);
    void add_layers(const std::string &name, llaisysTensor_t *slots, int n_layers,
                    const Shape &shape, bool is_optional = false);
    // The same with slots of the table's own, empty; they are returned and stay where they are.
    llaisysTensor_t *add_layers(const std::string &name, int n_layers, const Shape &shape,
                                bool is_optional = false);

    // Throws with what is wrong and leaves everything as it was, or takes the handle over.
    void replace(const std::string &field, int layer, llaisysTensor_t handle) {
        put(checked_slot(field, layer, handle), handle);
    }
    // The two halves of replace: the slot if it may hold the tensor, or what is wrong; then the
    // handle is taken over.
    llaisysTensor_t *checked_slot(const std::string &field, int layer,
                                  llaisysTensor_t handle) const;
    void put(llaisysTensor_t *slot, llaisysTensor_t handle);

    // Throws naming field and layer of the first slot that is empty or holds a wrong tensor.
    void check_complete() const;
    // check_complete, and what was written into the slots directly belongs to the table.
    void take_over();

    // Whether a model has the handle in one of its slots, and has taken it over.
    static bool is_held(const LlaisysTensor *handle) { return holder_of(handle) != nullptr; }

    // Tensors of the host become copies on the stream's device, in all slots but these.
    void move_to_device(const device::Stream &stream,
                        const std::vector<llaisysTensor_t *> &but_these) const;

    // Changes whenever a slot gets another handle.
    uint64_t fingerprint() const;

    std::string place_of(const llaisysTensor_t *slot) const; // "weight attn_q_w of layer 3"

    DeviceType device() const { return device_; }

private:
    const Field &field(const std::string &name) const; // throws, listing the names
    void check(const Field &field, int layer, const LlaisysTensor *handle) const;
    std::vector<llaisysTensor_t *> all_slots() const;
    bool holds(const LlaisysTensor *handle) const;
    // The living table that took the handle over and still has it; nullptr: none.
    static const WeightTable *holder_of(const LlaisysTensor *handle);
    bool is_held_elsewhere(const LlaisysTensor *handle) const;
    // Empties a slot into which a handle of another table was written directly.
    void leave_to_others(llaisysTensor_t *slot) const;

    DeviceType device_;
    int device_id_;
    std::vector<Field> fields_;
    std::deque<std::vector<llaisysTensor_t>> own_slots_;
    // What handles know of their owner; owns nothing.
    std::shared_ptr<const WeightTable> self_{this, [](const WeightTable *) {}};
};

} // namespace llaisys::runtime
