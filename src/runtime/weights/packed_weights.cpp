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
        slot.packed->weight = ops::LinearWeight::pack(stream, handle->tensor,
                                                      fused_slice(stream, slot, handle->tensor));
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

// The slice of the fused buffer for a slot that is filled for the first time. Otherwise without
// storage: another slot may share the previous values.
Tensor PackedWeights::fused_slice(const device::Stream &stream, const Slot &slot,
                                  const Tensor &weight) const {
    if (slot.buffer == nullptr || slot.packed->serial != 0 ||
        !ops::LinearWeight::lies_in_rows(stream)) {
        return Tensor();
    }
    Tensor &memory = slot.buffer->memory;
    if (!memory.defined()) {
        memory = Tensor::create({slot.buffer->rows, weight.size(1)}, weight.dtype(), stream.type(),
                                stream.device_id());
    }
    return memory.dtype() == weight.dtype()
               ? memory.slice(0, slot.first_row, slot.first_row + weight.size(0))
               : Tensor();
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
