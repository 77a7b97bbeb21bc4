// Asynchronous steps: each runs with its sampling on a thread of the pipeline, in launch order. A
// step may refer to tokens that the previous one samples.
//
// Where the device sampler supports the sampling parameters, a step is queued before the previous
// one has finished: sampled tokens stay on the device. When the device cannot decide a sample, its
// step and the one queued after it are rerun, and the next steps that may need a rerun run
// synchronously. Without reruns all such steps run synchronously.
//
//   launch(n)  launch(n + 1)  collect(n)  launch(n + 2)  collect(n + 1) ..
//
// A failed step samples nothing. Steps launched after it and before its failure was collected are
// aborted.
#pragma once

#include "runtime/runner/model_runner.hpp"

#include <atomic>
#include <condition_variable>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

namespace llaisys::runtime {

class StepPipeline {
public:
    // Limit of steps launched and not collected.
    static constexpr size_t kMaxInFlight = 8;
    // After a rerun, this many steps that may need a rerun (Async::maybe) run synchronously.
    static constexpr int kSyncStepsAfterRerun = 64;

    // Neither runner nor stream (the runner's) is owned; both outlive the pipeline. Only the
    // pipeline may use them from launch until wait returns.
    // can_rerun: false with several ranks, which must all run the same steps; whether a step has
    // to run again depends on the time at which the next one is launched.
    StepPipeline(const device::Stream &stream, ModelRunner &runner, bool can_rerun = true)
        : stream_(stream), runner_(runner), can_rerun_(can_rerun) {}
    // Finishes the running step and discards later ones.
    ~StepPipeline();
    StepPipeline(const StepPipeline &) = delete;
    StepPipeline &operator=(const StepPipeline &) = delete;

    // Queues a step and returns its ticket (ascending). Arrays of input and sampling must stay
    // valid and unchanged until the step is collected. Throws INVALID without tokens, with more
    // rows than tokens, or with too many steps in flight; all other checks happen when the step
    // runs.
    int64_t launch(const LlaisysStepInput &input, const LlaisysSamplingMetadata &sampling);

    // Waits for a step and writes ids[n_rows]. Discards earlier uncollected steps. DECODE_OK;
    // DECODE_NO_KV_SLOT; DECODE_ABORTED: not run because an earlier step failed; rethrows
    // exceptions of the step. INVALID for a ticket that is not in flight.
    int32_t collect(int64_t ticket, int32_t *ids);
    // Logprobs of row i of the last collected step; valid until the next collect. n is 0 when none
    // were requested. Throws INVALID for an unknown row.
    LlaisysLogprobs logprobs(int32_t i) const;

    // Waits until no step runs or is queued. Uncollected results stay available.
    void wait();

private:
    struct RowLogprobs {
        int32_t rank = 0;
        std::vector<int32_t> ids;
        std::vector<float> values;
    };
    struct Job {
        int64_t ticket = 0;
        bool is_chained = false; // the previous step was uncollected at launch: abort if it fails
        bool is_done = false;
        LlaisysStepInput input;
        LlaisysSamplingMetadata sampling;
        const int64_t *caller_token_ids = nullptr; // the caller's token_ids
        std::vector<int64_t> token_ids;            // with sampled ids filled in
        std::vector<int32_t> ids;
        std::vector<RowLogprobs> logprobs; // empty: none requested
        int slot = -1;                     // device sampler slot while queued
        int32_t code = LLAISYS_DECODE_OK;
        llaisysStatus_t status = LLAISYS_OK; // of an exception
        std::string error;
    };

    void work();
    // Runs a job, or queues it and leaves it in queued_.
    void start(Job *job);
    void run(Job *job);
    // Completes a job whose previous step failed before it was collected.
    bool abort_if_chained(Job *job);
    bool queue(Job *job);
    // Whether a queued job is sampled or has failed on the device.
    bool is_finished(const Job &job) const;
    // Waits for queued_, if any.
    void finish_queued(bool is_newest);
    // Stores results for the next step and wakes collect().
    void complete(Job *job);
    template <typename Body> void guard(Job *job, const Body &body);
    std::vector<int32_t> sources_of(Job *job) const;
    std::vector<int32_t> pending_rows_of(const Job &job) const;
    void resolve_tokens(Job *job) const;
    void execute(Job *job);
    void append_to_histories(const Job &job);
    void store_logprobs(Job *job);

    const device::Stream &stream_;
    ModelRunner &runner_;
    const bool can_rerun_;
    std::thread thread_; // started by the first launch

    mutable std::mutex mutex_; // guards the members below
    std::condition_variable changed_;
    std::deque<std::unique_ptr<Job>> jobs_; // uncollected, by ticket
    int64_t next_ticket_ = 1;
    int64_t n_waiting_ = 0; // jobs that are not done
    std::atomic<bool> is_stopping_{false};
    std::atomic<int64_t> newest_{0}; // last launched ticket

    std::unique_ptr<Job> collected_; // used by the caller's thread only
    // Used by the pipeline's thread only.
    bool is_device_set_ = false;
    Job *queued_ = nullptr;   // queued on the device; owned by jobs_
    bool must_rerun_ = false; // the previous sampling was undecided: the queued step is invalid
    int n_sync_steps_ = 0;    // remaining steps to run synchronously
    int64_t last_ticket_ = 0;
    bool is_last_good_ = false;
    std::vector<int32_t> last_ids_;
};

} // namespace llaisys::runtime
