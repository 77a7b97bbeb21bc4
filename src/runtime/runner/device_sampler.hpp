// The device sampler. Only ids and requested logprobs are copied to the host, and the next step may
// be queued before that. The host Sampler samples the rows that it cannot decide.
#pragma once

#include "device/runtime.hpp"
#include "llaisys/runtime/infer_types.h"
#include "ops/sample_rows/op.hpp"
#include "runtime/runner/sampler_chain.hpp"
#include "runtime/runner/sampling_plan.hpp"
#include "runtime/runner/step_arena.hpp"
#include "runtime/workspace/workspace.hpp"
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

    // Enqueues the sampling of logits, f32 [outputs, vocabulary] on the device, and the copy of its
    // results to the host. Without storage (a greedy plan only): no rows. Returns the result slot,
    // valid until the second next queue.
    int queue(const Tensor &logits, const SamplingPlan &plan);
    // Whether the result is on the host.
    bool is_done(int slot) const;
    // Waits for a result and writes its ids; sampling as queued. Appends the rows that the host
    // Sampler must sample, which decides them or reports the error; their ids are arbitrary.
    void finish(int slot, const LlaisysSamplingMetadata &sampling, int32_t *ids,
                std::vector<int32_t> *undecided) const;
    // Logprob data of a finished result.
    const SampledRows &found(int slot) const { return samples_[slot].found; }
    // Ids of the last queued sampling, i64 on the device, in stream order; and the index of row r
    // of its sampling in them.
    const Tensor &sampled() const { return sampled_; }
    int32_t sampled_row(const LlaisysSamplingMetadata &sampling, int32_t r) const {
        const bool is_by_output = samples_[last_].is_by_output && sampling.rows != nullptr;
        return is_by_output ? sampling.rows[r] : r;
    }

    // Copies rows of logits to the host, [n, vocabulary], valid until the next call. Synchronizes
    // the stream.
    const float *copy_rows_to_host(const Tensor &logits, const std::vector<int32_t> &rows);

private:
    struct HostMemory { // pinned, grow-only
        std::byte *data = nullptr;
        int64_t bytes = 0;
    };
    struct Sample {
        Workspace results; // device memory, copied to `host` as a whole
        HostMemory host;
        bool is_by_output = false;             // argmax: rows are output rows, not rows of the plan
        int64_t *ids = nullptr;                // host memory, like the pointers below
        float *values = nullptr;               // argmax: the logits of the ids
        const int32_t *is_undecided = nullptr; // planned: 1 = undecided
        std::vector<uint8_t> on_host;          // see SamplingPlan
        SampledRows found;
        StepArena arena; // upload of the plan
        void *done_event = nullptr;
        explicit Sample(const device::Stream &stream)
            : results(stream.type(), stream.device_id()), arena(stream) {}
        // Where a tensor of `results` is on the host.
        template <typename T> T *on_host_as(const Tensor &tensor) const {
            return reinterpret_cast<T *>(host.data + (tensor.data() - tensor.storage()->data()));
        }
    };
    struct UploadedPlan {
        ops::RowAdjustments adjustments;
        ops::RowSampling samples;
    };
    // Statistics of a plan's rows in scratch_.
    struct RowStats {
        Tensor source; // logits after masks, biases and penalties
        Tensor ids, values, sums, picks, raw_ids, raw_values;
    };
    void reserve(HostMemory *memory, int64_t bytes);
    template <typename Allocate> void allocate_in(Workspace *workspace, const Allocate &allocate);
    static UploadedPlan upload(const SamplingPlan &plan, int64_t vocabulary, StepArena *arena);
    void find(const Tensor &logits, const SamplingPlan &plan, const UploadedPlan &uploaded,
              RowStats *found);
    void queue_argmax(const Tensor &logits, Sample *sample);
    void queue_plan(const Tensor &logits, const SamplingPlan &plan, Sample *sample);

    const device::Stream &stream_;
    Sample samples_[2];
    int last_ = 1;
    Tensor sampled_;
    Workspace scratch_;
    HostMemory rows_;
};

} // namespace llaisys::runtime
