// The device sampler. Only ids and requested logprobs are copied to the host, and the next step may
// be queued before that. Where it cannot apply the whole sampler chain, it reduces each row for the
// host Sampler: applies masks, biases and penalties, sums the softmax weights, picks a token where
// the chain removes none, and copies the top-k logits.
#pragma once

#include "device/runtime.hpp"
#include "llaisys/runtime/infer_types.h"
#include "ops/sample_rows/op.hpp"
#include "runtime/runner/sampler_chain.hpp"
#include "runtime/runner/sampling_plan.hpp"
#include "runtime/runner/step_arena.hpp"
#include "tensor/tensor.hpp"

namespace llaisys::runtime {

class DeviceSampler {
public:
    explicit DeviceSampler(const device::Stream &stream);
    ~DeviceSampler();
    DeviceSampler(const DeviceSampler &) = delete;
    DeviceSampler &operator=(const DeviceSampler &) = delete;

    // False on the CPU, where the host Sampler reads the rows directly.
    bool is_supported() const { return stream_.type() != LLAISYS_DEVICE_CPU; }

    // Greedy: enqueues the argmax of each row of logits, f32 [n, vocabulary] on the device, and its
    // copy to the host. Without storage: no rows. Returns the result slot, valid until the second
    // next queue.
    int queue(const Tensor &logits);
    // Enqueues the sampling of a plan with async != no; otherwise as above.
    int queue(const Tensor &logits, const SamplingPlan &plan);
    // Whether the result is on the host.
    bool is_done(int slot) const;
    // Waits for a result and writes its ids; sampling as queued. False when a row is undecided (the
    // host Sampler decides it or reports the error); ids are then unchanged.
    bool finish(int slot, const LlaisysSamplingMetadata &sampling, int32_t *ids) const;
    // Logprob data of a finished result.
    const SampledRows &found(int slot) const { return samples_[slot].found; }
    // Ids of the last queued sampling, i64 on the device, in stream order; and the index of row r
    // of its sampling in them.
    const Tensor &sampled() const { return sampled_; }
    int32_t sampled_row(const LlaisysSamplingMetadata &sampling, int32_t r) const {
        const bool is_by_output = !samples_[last_].is_planned && sampling.rows != nullptr;
        return is_by_output ? sampling.rows[r] : r;
    }

    // Reduces logits, f32 [outputs, vocabulary] on the device, as the plan requires, with k =
    // max_top_k(vocabulary). Synchronizes the stream.
    static int64_t max_top_k(int64_t vocabulary) {
        return vocabulary < kMaxTopK ? vocabulary : kMaxTopK;
    }
    ReducedRows reduce(const Tensor &logits, const SamplingPlan &plan);
    // Copies rows of logits to the host, [n, vocabulary], valid until the next call. Synchronizes
    // the stream.
    const float *copy_rows_to_host(const Tensor &logits, const std::vector<int32_t> &rows);

private:
    // Device memory and pinned host memory of the same size; grow-only.
    struct StagingBuffer {
        std::shared_ptr<Storage> device;
        std::byte *host = nullptr;
        int64_t bytes = 0;
    };
    void reserve(StagingBuffer *staging, int64_t bytes);
    void copy_to_host(const StagingBuffer &staging, int64_t bytes);

    const device::Stream &stream_;
    struct Sample {
        StagingBuffer staging;
        bool is_planned = false;               // rows are rows of the plan, not output rows
        const int64_t *ids = nullptr;          // host memory, like the pointers below
        const float *values = nullptr;         // greedy: the logits of the ids
        const int32_t *is_undecided = nullptr; // planned: 1 = undecided
        SampledRows found;
        StepArena arena; // upload of the plan
        void *done_event = nullptr;
        explicit Sample(const device::Stream &stream) : arena(stream) {}
    };
    // The next of the two result slots, with staging memory of this size.
    Sample &acquire(int64_t bytes);
    int record_done(const Sample &sample); // after its copies are queued; returns the slot
    Sample samples_[2];
    int last_ = 1;
    Tensor sampled_;
    struct UploadedPlan {
        ops::RowAdjustments adjustments;
        ops::RowSampling samples;
    };
    static UploadedPlan upload(const SamplingPlan &plan, int64_t vocabulary, StepArena *arena);
    // Reduction results of a plan's rows: tensors in the first `bytes` of reduced_.
    struct RowStats {
        Tensor source; // logits after masks, biases and penalties
        Tensor ids, values, sums, picks, raw_ids, raw_values, raw_sums;
        int64_t bytes = 0;
    };
    RowStats find(const Tensor &logits, const SamplingPlan &plan, const UploadedPlan &uploaded);
    StepArena arena_; // upload of reduce()
    StagingBuffer reduced_;
    std::shared_ptr<Storage> adjusted_; // f32 [rows, vocabulary]
    int64_t adjusted_bytes_ = 0;
    StagingBuffer rows_; // host memory only
};

} // namespace llaisys::runtime
