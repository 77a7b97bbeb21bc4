#include "device/cpu/huge_memory.hpp"

#include <cstdint>
#include <mutex>
#include <new>
#include <sys/mman.h>
#include <unistd.h>

namespace llaisys::device {

namespace {

constexpr size_t kLine = 64;
constexpr size_t kHugePage = size_t(2) << 20;
constexpr size_t kSlab = size_t(64) << 20;
constexpr size_t kLargest =
    kSlab / 4; // largest block of a slab; larger blocks have their own mapping

// Header of a slab. A slab is aligned to its size, so a block finds it by its own address.
struct Slab {
    size_t used = kLine;
    size_t live = 0; // blocks
};

std::mutex mutex;
Slab *current = nullptr; // slab of the next allocation

// Page size of the kernel: 4, 16 or 64 KiB. madvise rounds lengths up to it, so ranges must end at
// a page boundary to leave the next block intact.
size_t page_bytes() {
    static const size_t bytes = size_t(sysconf(_SC_PAGESIZE));
    return bytes;
}

uintptr_t round_up(uintptr_t n, size_t unit) { return (n + unit - 1) / unit * unit; }

// Map `bytes`, a multiple of the page size, at a multiple of `alignment`; null on failure.
void *map_aligned(size_t bytes, size_t alignment) {
    const size_t reserved = bytes + alignment;
    void *memory =
        mmap(nullptr, reserved, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) {
        return nullptr;
    }
    const uintptr_t start = reinterpret_cast<uintptr_t>(memory);
    const uintptr_t aligned = round_up(start, alignment);
    if (aligned != start) {
        munmap(memory, aligned - start);
    }
    munmap(reinterpret_cast<void *>(aligned + bytes), start + reserved - (aligned + bytes));
    memory = reinterpret_cast<void *>(aligned);
    madvise(memory, bytes, MADV_HUGEPAGE); // a hint: small pages work too
    return memory;
}

// madvise for the whole pages inside a block.
void advise(void *memory, size_t bytes, int advice) {
    const uintptr_t address = reinterpret_cast<uintptr_t>(memory);
    const uintptr_t first = round_up(address, page_bytes());
    const uintptr_t last = (address + bytes) / page_bytes() * page_bytes();
    if (first < last) {
        madvise(reinterpret_cast<void *>(first), last - first, advice);
    }
}

void *allocate_in_slab(size_t bytes) {
    const std::lock_guard<std::mutex> lock(mutex);
    if (current == nullptr || kSlab - current->used < bytes) {
        void *memory = map_aligned(kSlab, kSlab);
        if (memory == nullptr) {
            return nullptr;
        }
        current = new (memory) Slab;
    }
    void *block = reinterpret_cast<char *>(current) + current->used;
    current->used += round_up(bytes, kLine);
    ++current->live;
    return block;
}

void release_in_slab(void *memory, size_t bytes) {
    const uintptr_t address = reinterpret_cast<uintptr_t>(memory);
    const std::lock_guard<std::mutex> lock(mutex);
    Slab *slab = reinterpret_cast<Slab *>(address / kSlab * kSlab);
    if (--slab->live == 0) {
        current = slab == current ? nullptr : current;
        munmap(slab, kSlab);
        return;
    }
    advise(memory, bytes, MADV_DONTNEED);
}

} // namespace

void *allocate_mapping(size_t bytes) {
    return bytes > SIZE_MAX / 2 ? nullptr : map_aligned(round_up(bytes, page_bytes()), kHugePage);
}

void release_mapping(void *memory, size_t bytes) { munmap(memory, round_up(bytes, page_bytes())); }

void *allocate_huge(size_t bytes) {
    return bytes <= kLargest ? allocate_in_slab(bytes) : allocate_mapping(bytes);
}

void release_huge(void *memory, size_t bytes) {
    if (bytes <= kLargest) {
        release_in_slab(memory, bytes);
    } else {
        release_mapping(memory, bytes);
    }
}

void use_small_pages(void *memory, size_t bytes) {
    if (bytes >= kHugeMemoryFrom) {
        advise(memory, bytes, MADV_NOHUGEPAGE);
        // Drop what an adjacent block on the same huge page has committed here.
        advise(memory, bytes, MADV_DONTNEED);
    }
}

} // namespace llaisys::device
