// Large copies of pageable memory (a mapped file) to the device: threads copy pieces into a ring of
// pinned memory while the copy engine empties it.
#pragma once

#include <cstddef>

namespace llaisys::device {

// Done when it returns. Thread-safe; one upload of a device runs at a time.
void upload_pageable(int device_id, void *dst, const void *src, size_t bytes);

// From here on the ring pays: smaller copies are left to the driver.
constexpr size_t kUploadRingFrom = size_t(4) << 20;

} // namespace llaisys::device
