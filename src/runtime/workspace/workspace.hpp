// Scratch memory of a forward: one arena that only grows, handed out as tensors.
//
// A forward calls begin() and then takes its buffers in the same order every time; while the
// capacity suffices their addresses stay the same and nothing is allocated.
#pragma once

#include "tensor/tensor.hpp"

namespace llaisys::runtime {

class Workspace {
public:
    Workspace(DeviceType device, int device_id) : device_(device), device_id_(device_id) {}

    // One that has no memory: take() gives tensors without storage and counts what they would use.
    static Workspace measuring();

    // Makes room for at least `bytes`. Tensors taken before stay valid (they share the old arena).
    void reserve(int64_t bytes);

    // Forgets what was taken; the next take starts at the front again.
    void begin() { used_ = 0; }

    // Dense, 64-byte aligned, values undefined. Throws when the arena is too small: reserve() first.
    Tensor take(const Shape &shape, DType dtype);

    // What take() will use of the arena for this tensor.
    static int64_t bytes_for(const Shape &shape, DType dtype);

    int64_t used() const { return used_; } // bytes taken since begin()
    int64_t capacity() const { return arena_ ? arena_->bytes() : 0; }
    int64_t allocations() const { return allocations_; } // of the arena, since the beginning

private:
    DeviceType device_;
    int device_id_;
    std::shared_ptr<Storage> arena_;
    int64_t used_ = 0;
    int64_t allocations_ = 0;
    bool is_measuring_ = false;
};

} // namespace llaisys::runtime
