#include "runtime/weights/packed_weights.hpp"

#include <algorithm>

namespace llaisys::runtime {

void PackedWeights::pack(const device::Stream &stream, const Slot &slot, llaisysTensor_t handle) {
    if (slot.packed->serial == handle->serial) {
        return;
    }
    const auto known = std::find_if(slots_.begin(), slots_.end(), [&](const Slot &other) {
        return other.packed->serial == handle->serial;
    });
    if (known != slots_.end()) {
        *slot.packed = *known->packed;
        return;
    }
    require(handle->tensor.defined(), table_.slot_name(slot.slot), " has no values: replace it");
    if (slot.is_lookup && is_activation(handle->tensor.dtype())) {
        *slot.packed = {};
        return;
    }
    if (slot.n_experts > 0) {
        slot.packed->experts = ops::ExpertWeights::pack(stream, handle->tensor, slot.n_experts);
    } else {
        // Another slot may share the previous values: only the first values go into the buffer.
        ops::LinearBuffer *buffer = slot.packed->serial == 0 ? slot.buffer : nullptr;
        slot.packed->weight =
            ops::LinearWeight::pack(stream, handle->tensor, buffer, slot.first_row);
    }
    slot.packed->serial = handle->serial;
    for (const Slot &other : slots_) {
        if (*other.slot == handle) {
            *other.packed = *slot.packed;
        }
    }
    if (!handle->tensor.is_mapped()) {
        handle->tensor = handle->tensor.without_storage();
    }
}

void PackedWeights::replace(const device::Stream &stream, const char *field, int layer,
                            llaisysTensor_t handle) {
    llaisysTensor_t *target = table_.checked_slot(field, layer, handle);
    for (const Slot &slot : slots_) {
        if (slot.slot == target) {
            pack(stream, slot, handle);
        }
    }
    table_.put(target, handle);
}

void PackedWeights::prepare(const device::Stream &stream) {
    const uint64_t fingerprint = table_.fingerprint();
    if (fingerprint == prepared_) {
        return;
    }
    table_.adopt_slots();
    for (const Slot &slot : slots_) {
        pack(stream, slot, *slot.slot);
    }
    std::vector<llaisysTensor_t *> packed;
    for (const Slot &slot : slots_) {
        if (slot.packed->defined()) {
            packed.push_back(slot.slot);
        }
    }
    table_.move_to_device(stream, packed);
    prepared_ = fingerprint;
}

} // namespace llaisys::runtime
