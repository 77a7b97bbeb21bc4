// Caching allocator of device memory for Storage: released blocks are cached and reused.
#pragma once

#include <cstddef>
#include <map>
#include <mutex>

namespace llaisys::device {

// One per device of the process. Thread-safe.
class CudaAllocator {
public:
    static CudaAllocator &of(int device_id);

    explicit CudaAllocator(int device_id) : device_id_(device_id) {}

    // Zeroed, 256-byte aligned. Throws LLAISYS_ERROR_MEMORY with the requested, free and total
    // bytes.
    void *allocate(size_t bytes);
    // Synchronizes the device: the next owner may use another stream.
    void release(void *memory, size_t bytes);

private:
    void *take(size_t rounded);
    void drop_kept();

    int device_id_;
    std::mutex mutex_;
    std::multimap<size_t, void *> kept_; // by rounded size
    size_t kept_bytes_ = 0;
};

} // namespace llaisys::device
