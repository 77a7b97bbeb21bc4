// Host-to-device copies of pageable memory (a mapped file): threads copy into pinned staging
// buffers while the copy engine drains them.
#pragma once

#include <cstddef>

namespace llaisys::device {

// Synchronous. Thread-safe; one upload per device at a time.
void upload_pageable(int device_id, void *dst, const void *src, size_t bytes);

// Smallest copy that is staged; smaller copies use cudaMemcpy.
constexpr size_t kStagedUploadMin = size_t(4) << 20;

} // namespace llaisys::device
