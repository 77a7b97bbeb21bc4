// The weights of products, laid out for the device's kernels once, when their slot is filled.
//
// The packed copy replaces the original: an owned tensor is let go, the pages of a mapped one are
// dropped. One copy serves every slot that holds the same handle, so that a tied embedding reads its
// rows from the bytes of the head.
#pragma once

#include "ops/linear/op.hpp"
#include "runtime/weights/weights.hpp"

#include <vector>

namespace llaisys::runtime {

// What a slot was packed into, and the handle that it was made from.
struct PackedWeight {
    ops::LinearWeight weight; // not defined(): not packed, or a table that is used as a tensor
    uint64_t serial = 0;      // of the handle; 0: none
};

// Memory that the weights of several products over one input share, one behind the other, where the
// device lays weights out in rows (ops::LinearWeight::lies_in_rows): they are one product then.
struct WeightRoom {
    Tensor memory; // [rows, in]; not defined until the first of them comes
    int64_t rows = 0;
};

class PackedWeights {
public:
    // The table outlives this.
    explicit PackedWeights(WeightTable &table) : table_(table) {}

    // *slot is the weight of a product. slot and packed stay where they are.
    void add(llaisysTensor_t *slot, PackedWeight *packed) {
        slots_.push_back({slot, packed, false, nullptr, 0});
    }
    // The same for a weight of out_features rows that goes into a room behind those added before.
    void add(llaisysTensor_t *slot, PackedWeight *packed, WeightRoom *room, int64_t out_features) {
        slots_.push_back({slot, packed, false, room, room->rows});
        room->rows += out_features;
    }
    // *slot is a table whose rows are looked up. It is packed when a product has packed its handle
    // (tied), or when its dtype is one that only products read; else it stays a tensor.
    void add_lookup(llaisysTensor_t *slot, PackedWeight *packed) {
        slots_.push_back({slot, packed, true, nullptr, 0});
    }

    // WeightTable::replace, and packs the tensor at once. A throw leaves everything as it was.
    void replace(const device::Stream &stream, const char *field, int layer,
                 llaisysTensor_t handle);

    // Takes slots that were written directly over, and packs what is not packed yet; throws naming
    // what is missing or wrong. What is not packed is moved to the stream's device. Free when no
    // slot has changed.
    void prepare(const device::Stream &stream);
    // Changes when the weights may lie elsewhere than before.
    uint64_t version() const { return prepared_; }

private:
    struct Slot {
        llaisysTensor_t *slot;
        PackedWeight *packed;
        bool is_lookup;
        WeightRoom *room; // null: none
        int64_t first_row;
    };
    Tensor room_for(const device::Stream &stream, const Slot &slot, const Tensor &weight) const;
    void pack(const device::Stream &stream, const Slot &slot, llaisysTensor_t handle);

    WeightTable &table_;
    std::vector<Slot> slots_;
    uint64_t prepared_ = 0; // fingerprint of the table that the packed weights belong to
};

} // namespace llaisys::runtime
