// Peak rates of the device, and event timing.
#pragma once

#include "device/cuda/cuda_runtime.hpp"

#include <functional>

namespace llaisys::device {

// Seconds of one call of work(), which queues on the stream: one warm-up call, then `repeats`
// calls between two events.
double cuda_seconds(const CudaStream &stream, int repeats, const std::function<void()> &work);

// See llaisysBenchProbe; best of several rounds. Allocates 2 GiB temporarily.
double measure_cuda(CudaStream &stream, Probe probe);

} // namespace llaisys::device
