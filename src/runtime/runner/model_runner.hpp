// Runs steps for both KV layouts: validate the input, allocate KV slots, build attention metadata,
// run the model, store output rows; then sample from them.
//
// A failed step leaves the KV metadata and the bytes of every used slot unchanged, and no output
// rows.
#pragma once

#include "models/model.hpp"
#include "runtime/graph/captured_steps.hpp"
#include "runtime/graph/graph.hpp"
#include "runtime/kv_cache/block_layout.hpp"
#include "runtime/kv_cache/kv_cache.hpp"
#include "runtime/kv_cache/kv_host_pool.hpp"
#include "runtime/kv_cache/kv_storage.hpp"
#include "runtime/output/output_buffer.hpp"
#include "runtime/output/pooler.hpp"
#include "runtime/runner/attention_metadata_builder.hpp"
#include "runtime/runner/device_sampler.hpp"
#include "runtime/runner/input_preparer.hpp"
#include "runtime/runner/profile.hpp"
#include "runtime/runner/sampler.hpp"
#include "runtime/runner/step_arena.hpp"

#include <optional>

namespace llaisys::runtime {

struct RunnerOptions {
    LlaisysKvLayout layout = LLAISYS_KV_LAYOUT_SLOT;
    int32_t block_size = 16;
    DType kv_dtype = LLAISYS_DTYPE_INVALID; // INVALID: that of the model's KvSpec
    int64_t n_slots = 0;                    // BLOCK: a multiple of block_size
    int64_t max_positions = 0;              // at most the model's limit
    int32_t max_ubatch = 512;               // tokens of one forward
    // Output rows and sequences per step reserved at construction; grows on demand.
    int64_t reserved_outputs = 256;
    // Use the device sampler for queued steps on a CPU too (for tests; the host sampler is faster
    // there).
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

    // Asynchronous steps: queue_step enqueues a step and its sampling before the ids of the
    // previous step are known on the host. Plans the sampling of the next queue_step; returns
    // whether the device can do all of it. pending_rows [n_rows]: for a row whose history lacks the
    // token that the previous queued step samples, the row of that token (sampled_row); otherwise
    // -1. Null: none.
    SamplingPlan::Async plan_sample(const LlaisysSamplingMetadata &sampling,
                                    const int32_t *pending_rows);
    // Like step(), followed by the planned sampling. *slot: result slot, valid until the step after
    // the next is queued. sources i32 [n_tokens]: for a token sampled by the previous queued step,
    // its row there; otherwise -1; null: none. Ids of such tokens in `input` are ignored but must
    // be valid.
    int32_t queue_step(const LlaisysStepInput &input, const LlaisysSamplingMetadata &sampling,
                       const int32_t *sources, int *slot);
    // Row of the device's ids that holds row r of the last queued sampling.
    int32_t sampled_row(const LlaisysSamplingMetadata &sampling, int32_t r) const {
        return device_sampler_.sampled_row(sampling, r);
    }
    // Whether a queued step may be rerun after a later one was queued: a rerun writes the same
    // values to the same slots.
    bool can_repeat() const { return blocks_.has_value(); }
    bool is_sampled(int slot) const { return device_sampler_.is_done(slot); }
    // Waits for the sampling. False when the device could not decide a row (undecided_); call sample()
    // then, before another step is queued.
    bool finish_sample(int slot, const LlaisysSamplingMetadata &sampling, int32_t *ids);

    // A step of more tokens is rejected without reading its arrays.
    int64_t n_slots() const { return options_.n_slots; }
    const OutputBuffer &output() const { return output_; }
    float *host_rows() {
        const Profile::Scope scope = profile_.memcpy("memcpy/logits");
        return output_.host_rows(stream_);
    }
    // See llaisysModelKeepHidden.
    void set_aux_hidden_layers(const std::vector<int32_t> &layers);
    // See llaisysModelReserveLora.
    void reserve_lora(int64_t n_slots, int64_t max_rank);
    // Auxiliary hidden states of the last step in host memory; synchronizes the stream. Null: none.
    const float *host_hidden() {
        const Profile::Scope scope = profile_.memcpy("memcpy/hidden");
        return aux_hidden_.row_size() > 0 ? aux_hidden_.host_rows(stream_) : nullptr;
    }
    // Discards rows, hidden states and logprobs of the last step. step() calls it.
    void clear_output() {
        output_.clear();
        hidden_.clear();
        aux_hidden_.clear();
        sampler_.clear_logprobs();
    }
    Pooler &pooler() { return pooler_; }
    Sampler &sampler() { return sampler_; }
    // Rows sampled since construction; see llaisysModelSampleCounts.
    struct Samples {
        int64_t on_device = 0, on_host = 0;
    };
    const Samples &samples() const { return samples_; }
    Profile &profile() { return profile_; }

    // Metadata of the SLOT layout; null in the BLOCK layout.
    KvCache *cells() { return cells_ ? &*cells_ : nullptr; }
    LlaisysKvStats kv_stats() const;
    std::string kv_dump() const;
    // Throw for slots outside [0, n_slots) and for duplicate targets; see KvStorage.
    void copy_slots(const int32_t *src, const int32_t *dst, int32_t n);
    void shift_slots(const int32_t *slots, const int64_t *delta, int32_t n);
    // Replaces the host memory for offloaded blocks (BLOCK layout), discarding its contents; 0:
    // none. `fd`: a file for it, or -1.
    void reserve_host(int32_t n_blocks, int fd) {
        host_pool_.reset();
        if (n_blocks > 0) {
            host_pool_.emplace(stream_, storage_, options_.block_size, n_blocks, fd);
        }
    }
    KvHostPool *host_pool() { return host_pool_ ? &*host_pool_ : nullptr; }

private:
    // Reserves memory so that no step of token ids allocates device memory.
    void reserve_largest_step();
    int32_t step_slot(const PreparedStep &step, const std::vector<UbatchRange> &ranges);
    int32_t step_block(const PreparedStep &step, const std::vector<UbatchRange> &ranges,
                       const LlaisysStepInput &input);
    // build_metadata(): builds metadata_ for this micro-batch.
    template <typename BuildMetadata>
    void forward(const PreparedStep &step, const UbatchRange &range,
                 const BuildMetadata &build_metadata);
    models::ModelInput build_input(const PreparedStep &step, const UbatchRange &range,
                                   int64_t n_padded);
    bool selects_output_rows(const UbatchRange &range, int64_t n_padded) const;
    bool has_lora(const PreparedStep &step, const UbatchRange &range) const;
    // Groups the rows of the slots in local_rows_ in memory of the arena.
    ops::LoraRows group_lora();
    // Upper bound of the arena bytes of n tokens, n_selected selected output rows and n_embd values
    // of embeddings, without attention metadata.
    int64_t max_input_bytes(int64_t n, int64_t n_selected, int64_t n_embd) const;
    uint64_t memory_version() const;
    void apply_kv_update();
    void pool_hidden(const PreparedStep &step);
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
    bool has_tuned_ = false; // a step of max_ubatch tokens has autotuned
    OutputBuffer output_;
    OutputBuffer hidden_; // of pooled tokens
    Pooler pooler_;
    OutputBuffer aux_hidden_;          // row_size 0: disabled
    std::vector<int32_t> step_tokens_; // 0, 1, ...
    Sampler sampler_;
    Profile profile_;

    StepArena arena_; // inputs of a forward
    DeviceSampler device_sampler_;
    Samples samples_;
    SamplingPlan plan_;
    std::vector<int32_t> sampled_ids_, undecided_; // of sample()
    const int32_t *sources_ = nullptr;             // of the step being queued
    std::vector<int32_t> local_rows_;              // scratch
    std::vector<SlotPlan> plans_;
    std::vector<Ubatch> ubatches_;
    KvUpdate update_;

    // BLOCK statistics of the last step.
    int64_t block_used_ = 0;
    int64_t block_peak_ = 0;
    int64_t block_sequences_ = 0;
};

} // namespace llaisys::runtime
