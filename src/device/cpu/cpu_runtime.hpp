// The CPU's stream is its thread pool.
#pragma once

#include "device/cpu/thread_pool.hpp"
#include "device/runtime.hpp"

namespace llaisys::device {

// Throws LLAISYS_ERROR_UNSUPPORTED for a stream of another device.
inline ThreadPool &pool_of(const Stream &stream) {
    if (stream.type() != LLAISYS_DEVICE_CPU) {
        fail(LLAISYS_ERROR_UNSUPPORTED, "a stream of device ", stream.runtime().name,
             " has no threads");
    }
    return *static_cast<ThreadPool *>(stream.native());
}

} // namespace llaisys::device
