// Draws on the device where only ids need to come back: steps in which every row takes its most
// likely token. Everything else goes through the Sampler, on the host.
#pragma once

#include "device/runtime.hpp"
#include "llaisys/runtime/infer_types.h"
#include "tensor/tensor.hpp"

namespace llaisys::runtime {

class DeviceDraw {
public:
    explicit DeviceDraw(const device::Stream &stream) : stream_(stream) {}
    ~DeviceDraw();
    DeviceDraw(const DeviceDraw &) = delete;
    DeviceDraw &operator=(const DeviceDraw &) = delete;

    // Whether this device draws at all; the CPU's sampler reads the rows where they are.
    bool is_there() const { return stream_.type() != LLAISYS_DEVICE_CPU; }

    // Makes room for so many rows. memory_version() changes when the memory has moved.
    void reserve(int64_t n_rows);
    int64_t memory_version() const { return capacity_; }

    // Finds the largest logit of each row of logits, f32 [n, vocabulary] on the device, and brings
    // it to the host, all in order with the stream: it may be part of a captured step.
    void queue(const Tensor &logits);
    // Waits for the stream and picks from what was queued last; for sampling that takes_best
    // (Sampler). False when a row has no largest logit (the Sampler says why); ids are then unchanged.
    bool finish(const LlaisysSamplingMetadata &sampling, int32_t *ids) const;

private:
    const device::Stream &stream_;
    Tensor index_;              // i64 [capacity]
    Tensor value_;              // f32 [capacity], behind it in the same memory
    std::byte *host_ = nullptr; // the same
    int64_t capacity_ = 0;
};

} // namespace llaisys::runtime
