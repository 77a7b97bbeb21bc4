#include "device/cuda/allocator.hpp"

#include "device/cuda/cuda_runtime.hpp"

#include <array>

namespace llaisys::device {

namespace {

constexpr size_t kGranule = size_t(1) << 9;
constexpr size_t kKeepAtMost = size_t(1) << 28; // larger blocks are freed at once
constexpr size_t kKeepInAll = size_t(1) << 30;
constexpr int kMaxDevices = 64;

size_t rounded_size(size_t bytes) {
    return (bytes == 0 ? kGranule : bytes + kGranule - 1) / kGranule * kGranule;
}

} // namespace

CudaAllocator &CudaAllocator::of(int device_id) {
    static std::mutex mutex;
    static std::array<CudaAllocator *, kMaxDevices> allocators{}; // never destroyed
    ensure(device_id >= 0 && device_id < kMaxDevices, "device ", device_id);
    const std::lock_guard<std::mutex> lock(mutex);
    CudaAllocator *&allocator = allocators[size_t(device_id)];
    if (allocator == nullptr) {
        allocator = new CudaAllocator(device_id);
    }
    return *allocator;
}

void *CudaAllocator::allocate(size_t bytes) {
    const std::lock_guard<std::mutex> lock(mutex_);
    LLAISYS_CUDA(cudaSetDevice(device_id_));
    const size_t size = rounded_size(bytes);
    void *memory = take(size);
    if (memory == nullptr) {
        drop_kept();
        memory = take(size);
    }
    if (memory == nullptr) {
        size_t free = 0;
        size_t total = 0;
        cudaMemGetInfo(&free, &total);
        fail(LLAISYS_ERROR_MEMORY, bytes, " bytes of memory of GPU ", device_id_,
             " could not be allocated: ", free, " of its ", total, " bytes are free");
    }
    LLAISYS_CUDA(cudaMemset(memory, 0, size));
    // other streams do not wait for the legacy stream
    LLAISYS_CUDA(cudaStreamSynchronize(cudaStreamLegacy));
    return memory;
}

// Null when out of memory.
void *CudaAllocator::take(size_t rounded) {
    const auto found = kept_.find(rounded);
    if (found != kept_.end()) {
        void *memory = found->second;
        kept_.erase(found);
        kept_bytes_ -= rounded;
        return memory;
    }
    void *memory = nullptr;
    const cudaError_t status = cudaMalloc(&memory, rounded);
    if (status == cudaErrorMemoryAllocation) {
        cudaGetLastError();
        return nullptr;
    }
    cuda_check(status, "cudaMalloc");
    return memory;
}

void CudaAllocator::release(void *memory, size_t bytes) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const size_t size = rounded_size(bytes);
    cudaSetDevice(device_id_);
    if (size > kKeepAtMost || kept_bytes_ + size > kKeepInAll) {
        cudaFree(memory);
        return;
    }
    cudaDeviceSynchronize();
    kept_.emplace(size, memory);
    kept_bytes_ += size;
}

void CudaAllocator::drop_kept() {
    for (const auto &entry : kept_) {
        cudaFree(entry.second);
    }
    kept_.clear();
    kept_bytes_ = 0;
}

} // namespace llaisys::device
