// Host memory of a file that other processes can map, such as a memfd.
#pragma once

#include "device/runtime.hpp"

#include <cstddef>

namespace llaisys::device {

// Resizes the file to `bytes` and maps it; on a GPU the pages are pinned, and kernels of the
// thread's current device can access them. Throws INVALID when fd is no file that can be resized,
// MEMORY when it cannot be mapped. The caller keeps ownership of fd, and may close it.
void *map_host_file(DeviceType type, int fd, size_t bytes);
void unmap_host_file(DeviceType type, void *memory, size_t bytes);

} // namespace llaisys::device
