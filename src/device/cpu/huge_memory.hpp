// Zeroed memory on huge pages. Weights are read completely in every step; with 4 KiB pages the TLB
// would be the bottleneck. Pages are committed on first touch.
#pragma once

#include <cstddef>

namespace llaisys::device {

// Smallest block that benefits.
constexpr size_t kHugeMemoryFrom = size_t(64) << 10;

// Return `bytes` >= kHugeMemoryFrom, aligned to a cache line; null without memory. Blocks of up to
// a few megabytes are adjacent in slabs, so that they share huge pages. A slab is unmapped with its
// last block; the pages inside a freed block are returned at once. Thread-safe.
void *allocate_huge(size_t bytes);
void release_huge(void *memory, size_t bytes);

// The same in a separate mapping, for short-lived blocks: a hole in a slab would split the huge
// pages around it.
void *allocate_mapping(size_t bytes);
void release_mapping(void *memory, size_t bytes);

// Use small pages for a block that has not been written yet, so that its first value commits one
// small page instead of 2 MiB. Blocks below kHugeMemoryFrom are unchanged.
void use_small_pages(void *memory, size_t bytes);

} // namespace llaisys::device
