// The CPU's stream is its thread pool.
#pragma once

#include "device/cpu/thread_pool.hpp"
#include "device/runtime.hpp"

namespace llaisys::device {

inline ThreadPool &pool_of(const Stream &stream) {
    return *static_cast<ThreadPool *>(stream.native());
}

} // namespace llaisys::device
