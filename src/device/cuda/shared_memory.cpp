#include "device/cuda/shared_memory.hpp"

#include "base/check.hpp"
#include "device/cuda/cuda_runtime.hpp"

#include <cstring>
#include <unistd.h>

namespace llaisys::device {

static_assert(sizeof(cudaIpcMemHandle_t) == sizeof(SharedMemory::handle));

SharedMemory allocate_shared(int device_id, size_t bytes) {
    SharedMemory memory{};
    memory.process = getpid();
    memory.device_id = device_id;
    LLAISYS_CUDA(cudaSetDevice(device_id));
    LLAISYS_CUDA(cudaMalloc(&memory.address, bytes)); // an allocation of its own, as IPC needs
    try {
        LLAISYS_CUDA(cudaMemset(memory.address, 0, bytes));
        LLAISYS_CUDA(cudaDeviceSynchronize());
        cudaIpcMemHandle_t handle;
        LLAISYS_CUDA(cudaIpcGetMemHandle(&handle, memory.address));
        std::memcpy(memory.handle, &handle, sizeof handle);
    } catch (...) {
        cudaFree(memory.address);
        throw;
    }
    return memory;
}

void release_shared(const SharedMemory &memory) {
    cudaSetDevice(int(memory.device_id));
    cudaFree(memory.address);
}

namespace {

void enable_peer_access(int device_id, int other) {
    int is_possible = 0;
    LLAISYS_CUDA(cudaDeviceCanAccessPeer(&is_possible, device_id, other));
    if (is_possible == 0) {
        fail(LLAISYS_ERROR_UNSUPPORTED, "GPU ", device_id, " cannot access the memory of GPU ",
             other);
    }
    const cudaError_t status = cudaDeviceEnablePeerAccess(other, 0);
    if (status == cudaErrorPeerAccessAlreadyEnabled) {
        cudaGetLastError();
        return;
    }
    cuda_check(status, "cudaDeviceEnablePeerAccess");
}

} // namespace

void *map_shared(int device_id, const SharedMemory &memory) {
    LLAISYS_CUDA(cudaSetDevice(device_id));
    if (memory.device_id != device_id) {
        enable_peer_access(device_id, int(memory.device_id));
    }
    if (memory.process == getpid()) {
        return memory.address;
    }
    cudaIpcMemHandle_t handle;
    std::memcpy(&handle, memory.handle, sizeof handle);
    void *mapped = nullptr;
    LLAISYS_CUDA(cudaIpcOpenMemHandle(&mapped, handle, cudaIpcMemLazyEnablePeerAccess));
    return mapped;
}

void unmap_shared(void *mapped, const SharedMemory &memory) {
    if (memory.process != getpid()) {
        cudaIpcCloseMemHandle(mapped);
    }
}

void register_host(void *memory, size_t bytes) {
    const unsigned flags = cudaHostRegisterPortable | cudaHostRegisterMapped;
    const cudaError_t status = cudaHostRegister(memory, bytes, flags);
    if (status == cudaErrorMemoryAllocation) {
        cudaGetLastError();
        fail(LLAISYS_ERROR_MEMORY, bytes, " bytes of host memory could not be pinned");
    }
    cuda_check(status, "cudaHostRegister");
    void *address = nullptr;
    const cudaError_t mapped = cudaHostGetDevicePointer(&address, memory, 0);
    if (mapped != cudaSuccess || address != memory) {
        cudaGetLastError();
        cudaHostUnregister(memory);
        fail(LLAISYS_ERROR_UNSUPPORTED, "the GPU cannot access registered host memory in place");
    }
}

void unregister_host(void *memory) { cudaHostUnregister(memory); }

} // namespace llaisys::device
