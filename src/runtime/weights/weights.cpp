#include "runtime/weights/weights.hpp"

#include <algorithm>

namespace llaisys::runtime {

void replace_slot(llaisysTensor_t *slot, llaisysTensor_t new_handle,
                  const std::vector<llaisysTensor_t *> &others) {
    llaisysTensor_t old = *slot;
    *slot = new_handle;
    if (old == nullptr || old == new_handle) {
        return;
    }
    for (const llaisysTensor_t *other : others) {
        if (other != slot && *other == old) {
            return;
        }
    }
    delete old;
}

void destroy_unique(const std::vector<llaisysTensor_t *> &slots) {
    std::vector<llaisysTensor_t> handles;
    for (llaisysTensor_t *slot : slots) {
        handles.push_back(*slot);
        *slot = nullptr;
    }
    std::sort(handles.begin(), handles.end());
    handles.erase(std::unique(handles.begin(), handles.end()), handles.end());
    for (llaisysTensor_t handle : handles) {
        delete handle;
    }
}

void WeightTable::add_global(const std::string &name, llaisysTensor_t *slot, const Shape &shape,
                             bool is_optional) {
    fields_.push_back({name, slot, 1, false, is_optional, shape, {}});
}

void WeightTable::add_layers(const std::string &name, llaisysTensor_t *slots, int n_layers,
                             const Shape &shape, bool is_optional) {
    fields_.push_back({name, slots, n_layers, true, is_optional, shape, {}});
}

llaisysTensor_t *WeightTable::add_layers(const std::string &name, const std::vector<bool> &layers,
                                         const Shape &shape, bool is_optional) {
    own_slots_.emplace_back(layers.size(), nullptr);
    llaisysTensor_t *slots = own_slots_.back().data();
    fields_.push_back({name, slots, int(layers.size()), true, is_optional, shape, layers});
    return slots;
}

const WeightTable::Field &WeightTable::field(const std::string &name) const {
    std::string names;
    for (const Field &field : fields_) {
        if (field.name == name) {
            return field;
        }
        names += (names.empty() ? "" : ", ") + field.name;
    }
    fail(LLAISYS_ERROR_INVALID, "weight field must be one of ", names, "; got '", name, "'");
}

namespace {

std::string slot_name_of(const WeightTable::Field &field, int layer) {
    return field.is_per_layer ? text("weight ", field.name, " of layer ", layer)
                              : text("weight ", field.name);
}

} // namespace

void WeightTable::check(const Field &field, int layer, const LlaisysTensor *handle) const {
    const std::string name = slot_name_of(field, layer);
    const Tensor &tensor = handle->tensor;
    require(!is_owned_elsewhere(handle), name, ": the tensor belongs to another model");
    require(tensor.shape() == field.shape, name, ": shape must be ", field.shape, ", got ",
            tensor.shape());
    const bool is_matrix = field.shape.ndim() == 2;
    require(is_matrix ? is_weight(tensor.dtype()) : is_activation(tensor.dtype()), name,
            ": dtype must be f32, f16, bf16", is_matrix ? " or a quantised one" : "", ", got ",
            name_of(tensor.dtype()));
    if (tensor.defined()) {
        const bool is_host = tensor.device() == LLAISYS_DEVICE_CPU; // copied to the device later
        require(is_host || (tensor.device() == device_ && tensor.device_id() == device_id_), name,
                ": the tensor is on another device than the model");
        require(tensor.is_contiguous(), name, ": the tensor must be contiguous, got strides ",
                tensor.strides());
    }
}

std::string WeightTable::slot_name(const llaisysTensor_t *slot) const {
    for (const Field &field : fields_) {
        for (int layer = 0; layer < field.count; ++layer) {
            if (field.slots + layer == slot) {
                return slot_name_of(field, layer);
            }
        }
    }
    return "a weight of no field";
}

llaisysTensor_t *WeightTable::checked_slot(const std::string &name, int layer,
                                           llaisysTensor_t handle) const {
    const Field &target = field(name);
    require(handle != nullptr, slot_name_of(target, layer), ": tensor is NULL");
    const int index = target.is_per_layer ? layer : 0;
    require(index >= 0 && index < target.count, "weight ", name, ": layer must be in [0, ",
            target.count, "), got ", layer);
    require(target.is_in(index), slot_name_of(target, layer), ": the layer has no such weight");
    check(target, layer, handle);
    require(handle->tensor.defined() || holds(handle), slot_name_of(target, layer),
            ": another model owns the values of this tensor");
    return target.slots + index;
}

void WeightTable::put(llaisysTensor_t *slot, llaisysTensor_t handle) {
    release_foreign(slot);
    replace_slot(slot, handle, all_slots());
    handle->owner = self_;
}

bool WeightTable::holds(const LlaisysTensor *handle) const {
    const std::vector<llaisysTensor_t *> slots = all_slots();
    return std::any_of(slots.begin(), slots.end(),
                       [&](const llaisysTensor_t *slot) { return *slot == handle; });
}

const WeightTable *WeightTable::owner_of(const LlaisysTensor *handle) {
    const auto owner = std::static_pointer_cast<const WeightTable>(handle->owner.lock());
    return owner != nullptr && owner->holds(handle) ? owner.get() : nullptr;
}

bool WeightTable::is_owned_elsewhere(const LlaisysTensor *handle) const {
    const WeightTable *holder = owner_of(handle);
    return holder != nullptr && holder != this;
}

void WeightTable::release_foreign(llaisysTensor_t *slot) const {
    if (*slot != nullptr && is_owned_elsewhere(*slot)) {
        *slot = nullptr;
    }
}

WeightTable::~WeightTable() {
    const std::vector<llaisysTensor_t *> slots = all_slots();
    for (llaisysTensor_t *slot : slots) {
        release_foreign(slot);
    }
    destroy_unique(slots);
}

void WeightTable::adopt_slots() {
    check_complete();
    for (const llaisysTensor_t *slot : all_slots()) {
        if (*slot != nullptr) {
            (*slot)->owner = self_;
        }
    }
}

void WeightTable::check_complete() const {
    for (const Field &field : fields_) {
        for (int layer = 0; layer < field.count; ++layer) {
            if (field.slots[layer] != nullptr) {
                check(field, layer, field.slots[layer]);
            } else {
                require(field.is_optional || !field.is_in(layer), slot_name_of(field, layer),
                        " is missing");
            }
        }
    }
}

void WeightTable::move_to_device(const device::Stream &stream,
                                 const std::vector<llaisysTensor_t *> &but_these) const {
    for (llaisysTensor_t *slot : all_slots()) {
        if (*slot == nullptr || !(*slot)->tensor.defined() ||
            (*slot)->tensor.device() == stream.type() ||
            std::find(but_these.begin(), but_these.end(), slot) != but_these.end()) {
            continue;
        }
        const Tensor &from = (*slot)->tensor;
        Tensor moved =
            Tensor::create(from.shape(), from.dtype(), stream.type(), stream.device_id());
        moved.load(from.data(), size_t(from.bytes()));
        (*slot)->tensor = moved;
    }
}

uint64_t WeightTable::fingerprint() const {
    uint64_t hash = 14695981039346656037u;
    for (const Field &field : fields_) {
        for (int i = 0; i < field.count; ++i) {
            hash ^= field.slots[i] != nullptr ? field.slots[i]->serial : 0;
            hash *= 1099511628211u;
        }
    }
    return hash;
}

std::vector<llaisysTensor_t *> WeightTable::all_slots() const {
    std::vector<llaisysTensor_t *> slots;
    for (const Field &field : fields_) {
        for (int i = 0; i < field.count; ++i) {
            slots.push_back(field.slots + i);
        }
    }
    return slots;
}

} // namespace llaisys::runtime
