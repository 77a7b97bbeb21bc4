#include "device/host_file.hpp"

#include "base/check.hpp"
#if defined(LLAISYS_HAVE_CUDA)
#include "device/cuda/shared_memory.hpp"
#endif

#include <cerrno>
#include <cstring>
#include <sys/mman.h>
#include <unistd.h>

namespace llaisys::device {

void *map_host_file(DeviceType type, int fd, size_t bytes) {
    require(ftruncate(fd, off_t(bytes)) == 0, "fd ", fd, " cannot be resized to ", bytes,
            " bytes: ", std::strerror(errno));
    void *memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (memory == MAP_FAILED) {
        fail(LLAISYS_ERROR_MEMORY, bytes,
             " bytes of a file could not be mapped: ", std::strerror(errno));
    }
#if defined(LLAISYS_HAVE_CUDA)
    if (type == LLAISYS_DEVICE_NVIDIA) {
        try {
            register_host(memory, bytes);
        } catch (...) {
            munmap(memory, bytes);
            throw;
        }
    }
#else
    (void)type;
#endif
    return memory;
}

void unmap_host_file(DeviceType type, void *memory, size_t bytes) {
#if defined(LLAISYS_HAVE_CUDA)
    if (type == LLAISYS_DEVICE_NVIDIA) {
        unregister_host(memory);
    }
#else
    (void)type;
#endif
    munmap(memory, bytes);
}

} // namespace llaisys::device
