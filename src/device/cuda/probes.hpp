// What the device can do at most, and times by its own clock.
#pragma once

#include "device/cuda/cuda_runtime.hpp"

#include <functional>

namespace llaisys::device {

// The seconds of one call of work(), which queues on the stream: one call first, then `repeats`
// between two events.
double cuda_seconds(const CudaStream &stream, int repeats, const std::function<void()> &work);

// As llaisysBenchProbe says; the best of several rounds. Takes 2 GiB of memory for a moment.
double measure_cuda(CudaStream &stream, Probe probe);

} // namespace llaisys::device
