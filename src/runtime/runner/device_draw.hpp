// Draws on the device where only ids need to come back: steps in which every row takes its most
// likely token. Where rows are drawn from their best few, these few come back. Everything else goes
// through the Sampler, on the host, with whole rows.
#pragma once

#include "device/runtime.hpp"
#include "llaisys/runtime/infer_types.h"
#include "tensor/tensor.hpp"

namespace llaisys::runtime {

class DeviceDraw {
public:
    // The most of a row's best logits that are brought to the host.
    static constexpr int64_t kMostBest = 256;

    explicit DeviceDraw(const device::Stream &stream);
    ~DeviceDraw();
    DeviceDraw(const DeviceDraw &) = delete;
    DeviceDraw &operator=(const DeviceDraw &) = delete;

    // Whether this device draws at all; the CPU's sampler reads the rows where they are.
    bool is_there() const { return stream_.type() != LLAISYS_DEVICE_CPU; }

    // Finds the largest logit of each row of logits, f32 [n, vocabulary] on the device, and brings
    // it to the host, all in order with the stream. Not defined: no rows. Returns the draw's place,
    // good until the next but one is queued.
    int queue(const Tensor &logits);
    // Whether a draw is on the host.
    bool is_over(int place) const;
    // Waits for a draw and picks from it; for sampling whose best_needed (Sampler) is 1. False when a
    // row has no largest logit (the Sampler says why); ids are then unchanged.
    bool finish(int place, const LlaisysSamplingMetadata &sampling, int32_t *ids) const;
    // The ids of the draw that was queued last, i64 [n] on the device, in order with the stream.
    const Tensor &drawn() const { return drawn_; }

    // The k best of each row of logits, with k = most_best(vocabulary), on the host: ids and values
    // [n, k] as Sampler::sample_best wants them, valid until the next call. Waits for the stream.
    struct Best {
        const int32_t *ids;
        const float *values;
        int64_t k;
    };
    static int64_t most_best(int64_t vocabulary) {
        return vocabulary < kMostBest ? vocabulary : kMostBest;
    }
    Best best_of(const Tensor &logits);

private:
    // Device memory and as much of the host's; grow-only.
    struct Room {
        std::shared_ptr<Storage> device;
        std::byte *host = nullptr;
        int64_t bytes = 0;
    };
    void reserve(Room *room, int64_t bytes);
    void bring(const Room &room, int64_t bytes);

    const device::Stream &stream_;
    struct Draw {
        Room room; // i64 indices, then f32 values, [capacity] each
        int64_t capacity = 0;
        void *is_done = nullptr; // event
    };
    Draw draws_[2];
    int last_ = 1;
    Tensor drawn_;
    Room best_; // i32 ids, then f32 values
};

} // namespace llaisys::runtime
