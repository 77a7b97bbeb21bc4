// Steps that run while the caller does something else: each with its sample, in the order in which they
// were launched, on a thread of the pipeline's own. A step may name tokens that the one launched
// before it will sample.
//
// Where the device makes the whole sample, a step is queued on it before the one in front of it has ended:
// its tokens go from sample to step without coming to the host. When a sample turns out not to be decided by
// what the device looks at, its step and the one that was queued behind it are run again; nothing that
// may come to that is queued for a while then.
//
//   launch(n)  launch(n + 1)  collect(n)  launch(n + 2)  collect(n + 1) ..
//
// A step that fails has sampled nothing, and those behind it that were launched before its failure was
// collected are not run.
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
    // Steps that may be launched and not collected.
    static constexpr size_t kMostLaunched = 8;
    // Steps that are not queued after one that had to be run again, unless they surely need not be.
    static constexpr int kHeldBack = 64;

    // Neither runner nor stream, the runner's, is owned; both outlive the pipeline. They are the
    // pipeline's from launch until wait returns.
    StepPipeline(const device::Stream &stream, ModelRunner &runner)
        : stream_(stream), runner_(runner) {}
    // The step that runs is finished, those behind it are dropped.
    ~StepPipeline();
    StepPipeline(const StepPipeline &) = delete;
    StepPipeline &operator=(const StepPipeline &) = delete;

    // Queues a step and returns its ticket, which rises. What input and sampling point to must stay
    // as it is until the step was collected. Throws INVALID when there are no tokens, more rows than
    // tokens, or too many steps out; everything else is checked when the step runs.
    int64_t launch(const LlaisysStepInput &input, const LlaisysSamplingMetadata &sampling);

    // Waits for a step: ids[n_rows of its sampling]. Earlier ones that nobody collected are
    // forgotten. DECODE_OK; DECODE_NO_KV_SLOT; DECODE_ABORTED when it was not run because one before
    // it failed; throws what the step or its sample threw. INVALID for a ticket that is not out.
    int32_t collect(int64_t ticket, int32_t *ids);
    // Of row i of the step that was collected last; valid until the next collect. n is 0 when none
    // were asked for. Throws INVALID for no such row.
    LlaisysLogprobs logprobs(int32_t i) const;

    // Returns when no step runs or waits to run; what is not collected stays.
    void wait();

private:
    struct RowLogprobs {
        int32_t rank = 0;
        std::vector<int32_t> ids;
        std::vector<float> values;
    };
    struct Job {
        int64_t ticket = 0;
        bool is_behind = false; // the one before was not collected when this one was launched
        bool is_done = false;
        LlaisysStepInput input;
        LlaisysSamplingMetadata sampling;
        const int64_t *named = nullptr; // the caller's token_ids
        std::vector<int64_t> token_ids; // with those that are sampled filled in
        std::vector<int32_t> ids;
        std::vector<RowLogprobs> logprobs; // empty: none were asked for
        int place = -1;                    // of the sample, while it is queued
        int32_t code = LLAISYS_DECODE_OK;
        llaisysStatus_t status = LLAISYS_OK; // of the exception
        std::string error;
    };

    void work();
    // Runs a job, or queues it and leaves it in queued_.
    void start(Job *job);
    void run(Job *job);
    bool queue(Job *job);
    // Whether a queued job need not be waited for: sampled, or failed on the device.
    bool is_over(const Job &job) const;
    // Waits for queued_, if there is one.
    void finish_queued(bool is_newest);
    // Keeps what the next step may ask for and tells who waits.
    void end(Job *job);
    template <typename Body> static void guard(Job *job, const Body &body);
    std::vector<int32_t> sources_of(Job *job) const;
    std::vector<int32_t> late_rows_of(const Job &job) const;
    void fill_in_tokens(Job *job) const;
    void execute(Job *job);
    void append_to_histories(const Job &job);
    void keep_logprobs(Job *job);

    const device::Stream &stream_;
    ModelRunner &runner_;
    std::thread thread_; // from the first launch on

    mutable std::mutex mutex_; // guards what follows
    std::condition_variable changed_;
    std::deque<std::unique_ptr<Job>> jobs_; // not collected, by ticket
    int64_t next_ticket_ = 1;
    int64_t n_waiting_ = 0; // of jobs_, not done
    std::atomic<bool> is_stopping_{false};
    std::atomic<int64_t> newest_{0}; // ticket that was launched last

    std::unique_ptr<Job> collected_; // the caller's
    // The thread's: whether it works on the stream's device, and of the step that ran last.
    bool is_bound_ = false;
    Job *queued_ = nullptr; // on the device; of jobs_
    bool was_open_ = false; // the sample before queued_ named other tokens than queued_ took
    int n_held_back_ = 0;   // steps to come
    int64_t last_ticket_ = 0;
    bool is_last_good_ = false;
    std::vector<int32_t> last_ids_;
};

} // namespace llaisys::runtime
