// Draws on the device. Steps in which every row takes its most likely token: only ids come back, and
// the next step may be queued before they do. Of other rows the device applies masks, biases and
// penalties, sums the weights, picks where nothing is cut off, and brings the best few to the host,
// where the Sampler makes the rest of the draw.
#pragma once

#include "device/runtime.hpp"
#include "llaisys/runtime/infer_types.h"
#include "ops/draw_rows/op.hpp"
#include "runtime/runner/draw_plan.hpp"
#include "runtime/runner/sampler_links.hpp"
#include "runtime/runner/step_arena.hpp"
#include "tensor/tensor.hpp"

namespace llaisys::runtime {

class DeviceDraw {
public:
    // The most of a row's best logits that are brought to the host.
    static constexpr int64_t kMostBest = kFewBest;

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

    // Finds out what a plan asks about logits, f32 [outputs, vocabulary] on the device, with k =
    // most_best(vocabulary). Waits for the stream.
    static int64_t most_best(int64_t vocabulary) {
        return vocabulary < kMostBest ? vocabulary : kMostBest;
    }
    ReducedRows reduce(const Tensor &logits, const DrawPlan &plan);
    // These rows of logits on the host, [n, vocabulary], valid until the next call. Waits for the
    // stream.
    const float *bring_rows(const Tensor &logits, const std::vector<int32_t> &rows);

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
    // Of reduce and bring_rows.
    ops::RowAdjustments upload(const DrawPlan &plan, int64_t vocabulary, Tensor *temperatures,
                               Tensor *uniforms);
    StepArena arena_;
    Room reduced_;
    std::shared_ptr<Storage> adjusted_; // f32 [rows, vocabulary]
    int64_t adjusted_bytes_ = 0;
    Room rows_; // on the host alone
};

} // namespace llaisys::runtime
