// Scratch memory of a forward: a grow-only arena from which tensors are allocated.
//
// A forward calls begin() and then allocates its buffers in a fixed order; while the capacity
// suffices, addresses stay the same and no memory is allocated.
#pragma once

#include "tensor/tensor.hpp"

namespace llaisys::runtime {

class Workspace {
public:
    Workspace(DeviceType device, int device_id) : device_(device), device_id_(device_id) {}

    // A workspace without memory: allocate() returns tensors without storage and counts their
    // bytes.
    static Workspace measuring() {
        Workspace workspace(LLAISYS_DEVICE_CPU, 0);
        workspace.is_measuring_ = true;
        return workspace;
    }

    // Grows to at least `bytes`. Existing tensors stay valid (they share the old arena).
    void reserve(int64_t bytes) {
        if (bytes > capacity()) {
            arena_ = std::make_shared<Storage>(device_, device_id_, bytes);
            used_ = 0;
            ++allocations_;
        }
    }

    // Releases all allocations; the next one starts at offset 0.
    void begin() { used_ = 0; }

    // Contiguous, 64-byte aligned, uninitialized. Throws when the arena is too small: reserve()
    // first.
    Tensor allocate(const Shape &shape, DType dtype) {
        const int64_t first = used_;
        const int64_t bytes = aligned(bytes_of(dtype, shape.elements()));
        ensure(is_measuring_ || (arena_ && bytes <= capacity() - first), "workspace of ",
               capacity(), " bytes has ", capacity() - first, " left, ", bytes, " are needed");
        used_ += bytes;
        return is_measuring_ ? Tensor::described(shape, dtype)
                             : Tensor::on(arena_, first, shape, dtype);
    }

    // Bytes that allocate() uses for a tensor of so many bytes.
    static int64_t aligned(int64_t bytes) { return (bytes + 63) / 64 * 64; }

    int64_t used() const { return used_; } // bytes allocated since begin()
    std::byte *data() const { return arena_->data(); }
    int64_t capacity() const { return arena_ ? arena_->bytes() : 0; }
    int64_t allocations() const { return allocations_; } // of the arena, since construction

private:
    DeviceType device_;
    int device_id_;
    std::shared_ptr<Storage> arena_;
    int64_t used_ = 0;
    int64_t allocations_ = 0;
    bool is_measuring_ = false;
};

} // namespace llaisys::runtime
