// The CPU's function table. Work on a stream is complete when its call returns, so events are
// always complete.
#include "device/cpu/cpu_runtime.hpp"

#include "device/cpu/huge_memory.hpp"
#include "device/cpu/isa.hpp"

#include <cstdlib>
#include <cstring>

#include <unistd.h>

namespace llaisys::device {

namespace {

constexpr size_t kAlignment = 64;

// Under AddressSanitizer allocations of plausible size use malloc, which it instruments.
#if defined(__SANITIZE_ADDRESS__)
constexpr size_t kHugeFrom = size_t(1) << 30;
#else
constexpr size_t kHugeFrom = kHugeMemoryFrom;
#endif

int device_count() { return 1; }

// Zeroed memory. Large blocks are committed on first touch: a KV cache costs what is used of it.
void *allocate(int, size_t bytes, Lifetime lifetime) {
    void *memory = nullptr;
    if (bytes >= kHugeFrom) {
        memory = lifetime == Lifetime::persistent ? allocate_huge(bytes) : allocate_mapping(bytes);
    } else {
        const size_t size = (bytes == 0 ? 1 : bytes) + kAlignment - 1;
        memory = std::aligned_alloc(kAlignment, size / kAlignment * kAlignment);
        if (memory != nullptr) {
            std::memset(memory, 0, bytes);
        }
    }
    if (memory == nullptr) {
        fail(LLAISYS_ERROR_MEMORY, bytes, " bytes of memory could not be allocated");
    }
    return memory;
}

void release(int, void *memory, size_t bytes, Lifetime lifetime) {
    if (bytes >= kHugeFrom) {
        lifetime == Lifetime::persistent ? release_huge(memory, bytes)
                                         : release_mapping(memory, bytes);
    } else {
        std::free(memory);
    }
}

void copy(void *dst, const void *src, size_t bytes, CopyKind, void *) {
    if (bytes > 0) {
        std::memmove(dst, src, bytes);
    }
}

void *create_stream(int, int n_threads) {
    cpu_isa(); // reports an invalid LLAISYS_CPU_ISA here instead of during a step
    return new ThreadPool(n_threads);
}

void destroy_stream(void *stream) { delete static_cast<ThreadPool *>(stream); }
void synchronize(void *) {}
void *handle_of(void *stream) { return stream; }

void *create_event(int) { return nullptr; }
void destroy_event(void *) {}
void record_event(void *, void *) {}
void wait_event(void *, void *) {}
bool query_event(void *) { return true; }

void *allocate_host(size_t bytes) {
    void *memory = std::malloc(bytes == 0 ? 1 : bytes);
    if (memory == nullptr) {
        fail(LLAISYS_ERROR_MEMORY, bytes, " bytes of memory could not be allocated");
    }
    return memory;
}
void release_host(void *memory) { std::free(memory); }

DeviceMemory memory(int) {
    const int64_t page = sysconf(_SC_PAGESIZE);
    return {page * sysconf(_SC_AVPHYS_PAGES), page * sysconf(_SC_PHYS_PAGES)};
}

std::string describe(int) { return text("cpu, ", name_of(cpu_isa()), " kernels"); }

} // namespace

const Runtime &cpu_runtime() {
    static const Runtime runtime = [] {
        Runtime table;
        table.type = LLAISYS_DEVICE_CPU;
        table.name = "cpu";
        table.device_count = device_count;
        table.allocate = allocate;
        table.release = release;
        table.copy = copy;
        table.create_stream = create_stream;
        table.destroy_stream = destroy_stream;
        table.synchronize = synchronize;
        table.handle_of = handle_of;
        table.create_event = create_event;
        table.destroy_event = destroy_event;
        table.record_event = record_event;
        table.wait_event = wait_event;
        table.query_event = query_event;
        table.allocate_host = allocate_host;
        table.release_host = release_host;
        table.memory = memory;
        table.describe = describe;
        return table;
    }();
    return runtime;
}

} // namespace llaisys::device
