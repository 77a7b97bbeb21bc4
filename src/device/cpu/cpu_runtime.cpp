// The CPU's function table. Work on a stream is done when its call returns, so events are born done.
#include "device/cpu/cpu_runtime.hpp"

#include "device/cpu/isa.hpp"

#include <cstdlib>
#include <cstring>
#include <new>
#include <sys/mman.h>

namespace llaisys::device {

namespace {

constexpr size_t kAlignment = 64;
constexpr size_t kPage = 4096;
constexpr size_t kHugePage = size_t(2) << 20; // from this size on memory is mapped

int device_count() { return 1; }

size_t rounded(size_t bytes, size_t unit) { return (bytes + unit - 1) / unit * unit; }

// Large blocks come from mmap: the kernel zeroes their pages when they are first touched, so that a
// KV cache costs what is used of it, and huge pages spare the TLB.
void *allocate(int, size_t bytes) {
    if (bytes > SIZE_MAX - kHugePage) {
        fail(LLAISYS_ERROR_MEMORY, bytes, " bytes of memory could not be allocated");
    }
    if (bytes >= kHugePage) {
        void *memory = mmap(nullptr, rounded(bytes, kPage), PROT_READ | PROT_WRITE,
                            MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (memory == MAP_FAILED) {
            fail(LLAISYS_ERROR_MEMORY, bytes, " bytes of memory could not be allocated");
        }
        madvise(memory, rounded(bytes, kPage), MADV_HUGEPAGE);
        return memory;
    }
    const size_t size = rounded(bytes == 0 ? 1 : bytes, kAlignment);
    void *memory = std::aligned_alloc(kAlignment, size);
    if (memory == nullptr) {
        fail(LLAISYS_ERROR_MEMORY, bytes, " bytes of memory could not be allocated");
    }
    std::memset(memory, 0, size);
    return memory;
}

void release(int, void *memory, size_t bytes) {
    if (bytes >= kHugePage) {
        munmap(memory, rounded(bytes, kPage));
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
    cpu_isa(); // a wrong LLAISYS_CPU_ISA is reported here, not in the middle of a step
    return new ThreadPool(n_threads);
}

void destroy_stream(void *stream) { delete static_cast<ThreadPool *>(stream); }
void synchronize(void *) {}

void *create_event(int) { return nullptr; }
void destroy_event(void *) {}
void record_event(void *, void *) {}
void wait_event(void *, void *) {}
bool query_event(void *) { return true; }

} // namespace

const Runtime &cpu_runtime() {
    static const Runtime runtime = {
        LLAISYS_DEVICE_CPU, "cpu",          device_count, allocate,     release,       copy,
        create_stream,      destroy_stream, synchronize,  create_event, destroy_event, record_event,
        wait_event,         query_event};
    return runtime;
}

} // namespace llaisys::device
