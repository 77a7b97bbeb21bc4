// Device memory that other ranks map: by CUDA IPC from other processes, by peer access from other
// devices. Contracts: device/runtime.hpp. And host memory that kernels access in place.
#pragma once

#include "device/runtime.hpp"

namespace llaisys::device {

SharedMemory allocate_shared(int device_id, size_t bytes);
void release_shared(const SharedMemory &memory);
void *map_shared(int device_id, const SharedMemory &memory);
void unmap_shared(void *mapped, const SharedMemory &memory);

// Pins mapped host memory, which kernels then access at the same address. Throws MEMORY.
void register_host(void *memory, size_t bytes);
void unregister_host(void *memory);

} // namespace llaisys::device
