// Device memory under Storage: blocks that were let go are kept and handed out again.
#pragma once

#include <cstddef>
#include <map>
#include <mutex>

namespace llaisys::device {

// One for each device of the process. Thread-safe.
class CudaAllocator {
public:
    static CudaAllocator &of(int device_id);

    explicit CudaAllocator(int device_id) : device_id_(device_id) {}

    // Zeroed, aligned to 256 bytes. Throws LLAISYS_ERROR_MEMORY with what was asked for, what is
    // free and what the device has in all.
    void *allocate(size_t bytes);
    // Waits for all work of the device: the next owner may use another stream.
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
