// Samples on the device: only ids and the logprobs that are asked for come back, and the next step may be
// queued before they do. A sample that the device cannot make as a whole is made by the Sampler: the device
// applies masks, biases and penalties, sums the weights, picks where nothing is cut off, and brings the
// best few to the host.
#pragma once

#include "device/runtime.hpp"
#include "llaisys/runtime/infer_types.h"
#include "ops/sample_rows/op.hpp"
#include "runtime/runner/sampler_links.hpp"
#include "runtime/runner/sampling_plan.hpp"
#include "runtime/runner/step_arena.hpp"
#include "tensor/tensor.hpp"

namespace llaisys::runtime {

class DeviceSampler {
public:
    // The most of a row's best logits that are brought to the host.
    static constexpr int64_t kMostBest = kFewBest;

    explicit DeviceSampler(const device::Stream &stream);
    ~DeviceSampler();
    DeviceSampler(const DeviceSampler &) = delete;
    DeviceSampler &operator=(const DeviceSampler &) = delete;

    // Whether this device samples at all; the CPU's sampler reads the rows where they are.
    bool is_there() const { return stream_.type() != LLAISYS_DEVICE_CPU; }

    // Finds the largest logit of each row of logits, f32 [n, vocabulary] on the device, and brings
    // it to the host, all in order with the stream. Not defined: no rows. Returns the sample's place,
    // good until the next but one is queued.
    int queue(const Tensor &logits);
    // Samples the rows of a plan that a device can make, of logits as above; the same otherwise.
    int queue(const Tensor &logits, const SamplingPlan &plan);
    // Whether a sample is on the host.
    bool is_over(int place) const;
    // Waits for a sample and tells its ids, of the sampling that it was queued for. False when a row was
    // not decided (the Sampler does, or says why not); ids are then unchanged.
    bool finish(int place, const LlaisysSamplingMetadata &sampling, int32_t *ids) const;
    // Of a sample that finish has told.
    const SampledRows &found(int place) const { return samples_[place].found; }
    // The ids of the sample that was queued last, i64 on the device, in order with the stream, and where
    // among them that of row r of its sampling is.
    const Tensor &sampled() const { return sampled_; }
    int32_t sampled_row(const LlaisysSamplingMetadata &sampling, int32_t r) const {
        const bool is_by_output = !samples_[last_].is_planned && sampling.rows != nullptr;
        return is_by_output ? sampling.rows[r] : r;
    }

    // Finds out what a plan asks about logits, f32 [outputs, vocabulary] on the device, with k =
    // most_best(vocabulary). Waits for the stream.
    static int64_t most_best(int64_t vocabulary) {
        return vocabulary < kMostBest ? vocabulary : kMostBest;
    }
    ReducedRows reduce(const Tensor &logits, const SamplingPlan &plan);
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
    struct Sample {
        Room room;
        bool is_planned = false;          // rows are those of the plan, not of the outputs
        const int64_t *ids = nullptr;     // on the host, as are those below
        const float *values = nullptr;    // not planned: the logits of these
        const int32_t *is_open = nullptr; // planned: 1: not decided
        SampledRows found;
        StepArena arena;         // of the plan
        void *is_done = nullptr; // event
        explicit Sample(const device::Stream &stream) : arena(stream) {}
    };
    // Takes the next of samples_, with room for so many bytes.
    Sample &next(int64_t bytes);
    int end(const Sample &sample); // all that it brings to the host is queued
    Sample samples_[2];
    int last_ = 1;
    Tensor sampled_;
    struct Uploaded {
        ops::RowAdjustments adjustments;
        ops::RowSampling samples;
    };
    static Uploaded upload(const SamplingPlan &plan, int64_t vocabulary, StepArena *arena);
    // What is known of the rows of a plan, in reduced_, whose first so many bytes it is.
    struct Findings {
        Tensor ids, values, sums, picks, raw_ids, raw_values, raw_sums;
        int64_t bytes = 0;
    };
    Findings find(const Tensor &logits, const SamplingPlan &plan, const Uploaded &uploaded);
    StepArena arena_; // of reduce
    Room reduced_;
    std::shared_ptr<Storage> adjusted_; // f32 [rows, vocabulary]
    int64_t adjusted_bytes_ = 0;
    Room rows_; // on the host alone
};

} // namespace llaisys::runtime
