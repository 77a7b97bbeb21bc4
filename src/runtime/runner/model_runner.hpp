// Runs steps: prepare the input, find room in the KV cache, say what attention sees, run the model,
// keep the output rows; then sample from them. The one entry for both KV layouts.
//
// After a step that failed, the KV metadata and the bytes of every slot that was in use are as they
// were, and there are no output rows.
#pragma once

#include "models/model.hpp"
#include "runtime/graph/captured_steps.hpp"
#include "runtime/graph/graph.hpp"
#include "runtime/kv_cache/block_layout.hpp"
#include "runtime/kv_cache/kv_cache.hpp"
#include "runtime/kv_cache/kv_host_pool.hpp"
#include "runtime/kv_cache/kv_storage.hpp"
#include "runtime/output/output_buffer.hpp"
#include "runtime/output/pool.hpp"
#include "runtime/runner/attention_metadata_builder.hpp"
#include "runtime/runner/device_sampler.hpp"
#include "runtime/runner/input_preparer.hpp"
#include "runtime/runner/profile.hpp"
#include "runtime/runner/sampler.hpp"
#include "runtime/runner/step_arena.hpp"

#include <memory>
#include <optional>

namespace llaisys::runtime {

struct RunnerOptions {
    LlaisysKvLayout layout = LLAISYS_KV_LAYOUT_SLOT;
    int32_t block_size = 16;
    DType kv_dtype = LLAISYS_DTYPE_INVALID; // INVALID: the one of the model's KvSpec
    int64_t n_slots = 0;                    // BLOCK: a whole number of blocks
    int64_t max_positions = 0;              // at most what the model allows
    int32_t max_ubatch = 512;               // tokens of one forward
    // Output rows and sequences of a step for which there is room from the start; more make it grow.
    int64_t reserved_outputs = 256;
    // Whether samples are made on the device where that can be. Its rows are the host's on a CPU, whose
    // Sampler is faster there.
    bool samples_on_cpu = false;
};

class ModelRunner {
public:
    // Neither stream nor model is owned; both outlive the runner.
    ModelRunner(const device::Stream &stream, models::Model &model, const RunnerOptions &options);

    // LLAISYS_DECODE_OK or NO_KV_SLOT; throws INVALID for input that can never run.
    int32_t step(const LlaisysStepInput &input);
    // step, then sample; ids as in Sampler::sample.
    int32_t execute_step(const LlaisysStepInput &input, const LlaisysSamplingMetadata &sampling,
                         int32_t *ids);
    void sample(const LlaisysSamplingMetadata &sampling, int32_t *ids);

    // A step and its sample that are only queued: the next step may be queued before this one's ids are
    // known. Plans the sample; whether the device can make all of it, and so a step with it be queued.
    // late_rows [n_rows]: for a row whose history lacks what the sample queued before makes, its place
    // there (sampled_row); otherwise -1. Null: there is none.
    SamplingPlan::Ahead plan_sample(const LlaisysSamplingMetadata &sampling,
                                    const int32_t *late_rows);
    // As step, with the sample that was planned last; *place: of the sample, good until the next but one is
    // queued. sources i32 [n_tokens]: for a token that the sample queued before makes, its place there;
    // otherwise -1. The ids of the former in `input` are not looked at, but must be some token's. Null:
    // no such tokens.
    int32_t queue_step(const LlaisysStepInput &input, const LlaisysSamplingMetadata &sampling,
                       const int32_t *sources, int *place);
    // Where the id of row r of the sampling that was queued last is.
    int32_t sampled_row(const LlaisysSamplingMetadata &sampling, int32_t r) const {
        return device_sampler_.sampled_row(sampling, r);
    }
    // Whether a step that was queued may be run again, with another behind it: it then writes what it
    // wrote, where it wrote it.
    bool can_repeat() const { return blocks_.has_value(); }
    bool is_sampled(int place) const { return device_sampler_.is_over(place); }
    // Waits for the sample. False where it did not decide a row; sample does or says why not, as long as
    // no other step was queued.
    bool finish_sample(int place, const LlaisysSamplingMetadata &sampling, int32_t *ids);

    // A step of more tokens is refused without a look at its arrays.
    int64_t n_slots() const { return options_.n_slots; }
    const OutputBuffer &output() const { return output_; }
    float *host_rows() {
        const Profile::Scope scope = profile_.memcpy();
        return output_.host_rows(stream_);
    }
    // See llaisysModelKeepHidden.
    void keep_hidden(const std::vector<int32_t> &layers);
    // The hidden states of the last step's tokens in host memory, its work done; null: none.
    const float *host_hidden() {
        const Profile::Scope scope = profile_.memcpy();
        return kept_.row_size() > 0 ? kept_.host_rows(stream_) : nullptr;
    }
    // Drops the rows, hidden states and logprobs of the last step; step does so itself.
    void clear_output() {
        output_.clear();
        hidden_.clear();
        kept_.clear();
        sampler_.clear_logprobs();
    }
    // Vectors of sequences that steps were asked to pool.
    Pool &pool() { return pool_; }
    Sampler &sampler() { return sampler_; }
    // Rows sampled since the beginning, and where; see llaisysModelDraws.
    struct Samples {
        int64_t on_device = 0, on_host = 0;
    };
    const Samples &samples() const { return samples_; }
    const GraphRunner &graph() const { return graph_; }
    Profile &profile() { return profile_; }

    // The books of the SLOT layout; null in the BLOCK layout.
    KvCache *cells() { return cells_ ? &*cells_ : nullptr; }
    LlaisysKvStats kv_stats() const;
    std::string kv_dump() const;
    // Any slots in [0, n_slots), none written twice, checked; see KvStorage.
    void copy_slots(const int32_t *src, const int32_t *dst, int32_t n);
    void shift_slots(const int32_t *slots, const int64_t *delta, int32_t n);
    // Memory beside the cache (BLOCK layout); n_blocks 0: none. What it held is gone.
    void reserve_host(int32_t n_blocks) {
        host_pool_.reset();
        if (n_blocks > 0) {
            host_pool_.emplace(stream_, storage_, options_.block_size, n_blocks);
        }
    }
    KvHostPool *host_pool() { return host_pool_ ? &*host_pool_ : nullptr; }

private:
    // Returns how many rows had to be looked at as a whole on the host; -1: all, and none is sampled.
    int32_t sample_on_device(const LlaisysSamplingMetadata &sampling, int32_t *ids);
    // So that no step of token ids has to allocate device memory.
    void reserve_largest_step();
    int32_t step_slot(const PreparedStep &step, const std::vector<UbatchRange> &ranges);
    int32_t step_block(const PreparedStep &step, const std::vector<UbatchRange> &ranges,
                       const LlaisysStepInput &input);
    // describe(): tells metadata_ what attention sees of this micro-batch.
    template <typename Describe>
    void forward(const PreparedStep &step, const UbatchRange &range, const Describe &describe);
    models::ModelInput put_input(const PreparedStep &step, const UbatchRange &range,
                                 int64_t n_padded);
    bool goes_on_with_outputs(const UbatchRange &range, int64_t n_padded) const;
    int64_t input_bytes(const PreparedStep &step, const UbatchRange &range, int64_t n_padded) const;
    uint64_t memory_version() const;
    void move_keys();
    void pool_rows(const PreparedStep &step);
    void check_slots(const char *name, const int32_t *slots, int32_t n) const;
    void check_distinct(const char *name, const int32_t *slots, int32_t n); // uses local_rows_

    const device::Stream &stream_;
    models::Model &model_;
    RunnerOptions options_;

    InputPreparer preparer_;
    AttentionMetadataBuilder metadata_;
    std::optional<KvCache> cells_;      // SLOT
    std::optional<BlockTables> blocks_; // BLOCK
    KvStorage storage_;
    std::optional<KvHostPool> host_pool_;
    Workspace workspace_;
    GraphRunner graph_;
    CapturedSteps captured_;
    bool has_tried_ = false; // a step of max_ubatch tokens was run, which may try
    OutputBuffer output_;
    OutputBuffer hidden_; // of the pooled tokens; grows when some are
    Pool pool_;
    OutputBuffer kept_;                // rows of 0 numbers: none are kept
    std::vector<int32_t> step_tokens_; // 0, 1, ..: every token has hidden states
    Sampler sampler_;
    Profile profile_;

    StepArena arena_; // inputs of a forward
    DeviceSampler device_sampler_;
    Samples samples_;
    SamplingPlan plan_;
    bool takes_best_ = false; // the sample that was planned last
    int place_ = -1;          // where device_sampler_ holds the rows of this step; -1: nowhere
    const int32_t *sources_ = nullptr; // of the step that is being queued
    std::vector<int32_t> local_rows_;  // scratch
    std::vector<SlotPlan> plans_;
    std::vector<Ubatch> ubatches_;
    KvUpdate update_;

    // BLOCK statistics of the last step.
    int64_t block_used_ = 0;
    int64_t block_peak_ = 0;
    int64_t block_sequences_ = 0;
};

} // namespace llaisys::runtime
