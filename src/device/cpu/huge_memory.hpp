// Zeroed memory on huge pages. Weights are read from end to end at every step; on 4 KiB pages the
// TLB, not the memory, would be the limit of that. A page is real only once it is touched.
#pragma once

#include <cstddef>

namespace llaisys::device {

// Blocks of this size and above are worth it.
constexpr size_t kHugeMemoryFrom = size_t(64) << 10;

// `bytes` >= kHugeMemoryFrom, aligned to a cache line; null when there is no memory. Blocks of a
// few megabytes and less lie side by side in slabs, so that they share huge pages; a slab goes back
// to the system with its last block, and the pages inside a block at once. Any thread may call.
void *allocate_huge(size_t bytes);
void release_huge(void *memory, size_t bytes);

// The same in a mapping of its own, for a block that goes before its neighbours would: a hole in a
// slab splits the huge pages that reach into it, and what lies on them is read more slowly.
void *allocate_apart(size_t bytes);
void release_apart(void *memory, size_t bytes);

// Small pages for a block on which nothing was written yet: the first value then takes one of these,
// not 2 MiB. Blocks below kHugeMemoryFrom are left alone.
void use_small_pages(void *memory, size_t bytes);

} // namespace llaisys::device
