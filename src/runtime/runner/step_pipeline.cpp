#include "runtime/runner/step_pipeline.hpp"

#include <algorithm>
#include <unordered_map>

namespace llaisys::runtime {

namespace {

// Checks that token i refers to one of the n ids sampled by the previous step.
void check_sampled(size_t i, int64_t token, int64_t n) {
    require(token >= -n, "token_ids[", i, "] is ", token, "; the previous step sampled ", n,
            " ids");
}

} // namespace

StepPipeline::~StepPipeline() {
    {
        const std::lock_guard<std::mutex> lock(mutex_);
        is_stopping_ = true;
    }
    changed_.notify_all();
    if (thread_.joinable()) {
        thread_.join();
    }
}

int64_t StepPipeline::launch(const LlaisysStepInput &input,
                             const LlaisysSamplingMetadata &sampling) {
    require(input.n_tokens >= 1, "n_tokens must be at least 1, got ", input.n_tokens);
    require(sampling.n_rows >= 0 && sampling.n_rows <= input.n_tokens, "n_rows must be in [0, ",
            input.n_tokens, "], the tokens of the step, got ", sampling.n_rows);
    require(input.token_ids != nullptr && input.embd == nullptr,
            "token_ids must be given, and embd must be NULL");
    auto job = std::make_unique<Job>();
    job->input = input;
    job->sampling = sampling;
    if (input.n_tokens <= runner_.n_slots()) {
        job->caller_token_ids = input.token_ids;
        job->token_ids.assign(input.token_ids, input.token_ids + input.n_tokens);
        job->input.token_ids = job->token_ids.data();
    }
    const std::lock_guard<std::mutex> lock(mutex_);
    require(jobs_.size() < kMaxInFlight, "at most ", kMaxInFlight,
            " steps may be launched and not collected");
    if (!thread_.joinable()) {
        thread_ = std::thread([this] { work(); });
    }
    job->ticket = next_ticket_;
    job->is_chained = !jobs_.empty() && jobs_.back()->ticket + 1 == next_ticket_;
    jobs_.push_back(std::move(job));
    newest_ = next_ticket_;
    ++n_waiting_;
    changed_.notify_all();
    return next_ticket_++;
}

int32_t StepPipeline::collect(int64_t ticket, int32_t *ids) {
    {
        std::unique_lock<std::mutex> lock(mutex_);
        const auto is_it = [&](const auto &job) { return job->ticket == ticket; };
        require(std::any_of(jobs_.begin(), jobs_.end(), is_it), "ticket must be that of a step ",
                "that was launched and not collected, got ", ticket);
        changed_.wait(lock,
                      [&] { return (*std::find_if(jobs_.begin(), jobs_.end(), is_it))->is_done; });
        while (jobs_.front()->ticket < ticket) {
            jobs_.pop_front();
        }
        collected_ = std::move(jobs_.front());
        jobs_.pop_front();
    }
    if (collected_->status != LLAISYS_OK) {
        throw Error(collected_->status, collected_->error);
    }
    if (collected_->code == LLAISYS_DECODE_OK) {
        std::copy(collected_->ids.begin(), collected_->ids.end(), ids);
    }
    return collected_->code;
}

LlaisysLogprobs StepPipeline::logprobs(int32_t i) const {
    const int32_t n = collected_ ? int32_t(collected_->ids.size()) : 0;
    require(i >= 0 && i < n, "row must be in [0, ", n, "), got ", i);
    if (collected_->logprobs.empty() || collected_->logprobs[size_t(i)].ids.empty()) {
        return {0, 0, nullptr, nullptr};
    }
    const RowLogprobs &row = collected_->logprobs[size_t(i)];
    return {int32_t(row.ids.size()), row.rank, row.ids.data(), row.values.data()};
}

void StepPipeline::wait() {
    std::unique_lock<std::mutex> lock(mutex_);
    changed_.wait(lock, [&] { return n_waiting_ == 0; });
}

void StepPipeline::work() {
    std::unique_lock<std::mutex> lock(mutex_);
    while (true) {
        const int64_t n_queued = queued_ != nullptr ? 1 : 0;
        changed_.wait(lock, [&] { return n_waiting_ > 0 || is_stopping_; });
        if (is_stopping_) {
            lock.unlock();
            finish_queued(true);
            return;
        }
        if (n_waiting_ > n_queued) {
            Job *job = jobs_[jobs_.size() - size_t(n_waiting_ - n_queued)].get();
            lock.unlock();
            start(job); // jobs_ owns it until it is collected
        } else {        // wait for its completion or for the next step
            const int64_t ticket = queued_->ticket;
            lock.unlock();
            while (!is_finished(*queued_) && newest_ == ticket && !is_stopping_) {
                std::this_thread::yield();
            }
            if (newest_ == ticket) {
                finish_queued(true);
            }
        }
        lock.lock();
    }
}

void StepPipeline::start(Job *job) {
    if (queued_ != nullptr && is_finished(*queued_)) {
        finish_queued(true); // deliver its ids before queueing this step
    }
    if (queued_ == nullptr && abort_if_chained(job)) {
        return;
    }
    if (!queue(job)) {
        finish_queued(true);
        return run(job);
    }
    const bool is_in_flight = job->status == LLAISYS_OK && job->code == LLAISYS_DECODE_OK;
    finish_queued(!is_in_flight);
    if (!is_in_flight) {
        return complete(job);
    }
    if (must_rerun_) {
        must_rerun_ = false;
        return run(job);
    }
    queued_ = job;
    if (is_finished(*job)) {
        finish_queued(true);
    }
}

bool StepPipeline::is_finished(const Job &job) const {
    try {
        return runner_.is_sampled(job.slot);
    } catch (const Error &) {
        return true; // finish_queued reports the error
    }
}

// Queues a job. False: the step must run synchronously. A failed job has its code or status set.
bool StepPipeline::queue(Job *job) {
    if (job->input.pooling != nullptr) { // a rerun would pool twice
        return false;
    }
    try {
        const std::vector<int32_t> pending = pending_rows_of(*job);
        const auto ahead =
            runner_.plan_sample(job->sampling, pending.empty() ? nullptr : pending.data());
        const bool may_rerun = ahead == SamplingPlan::Async::maybe;
        if (ahead == SamplingPlan::Async::no || (may_rerun && !can_rerun_) ||
            (may_rerun && n_sync_steps_ > 0 && n_sync_steps_-- > 0)) {
            return false;
        }
    } catch (const Error &) {
        return false; // sampling reports the error after the step
    }
    guard(job, [&] {
        std::vector<int32_t> sources;
        if (queued_ != nullptr) {
            sources = sources_of(job);
        } else {
            resolve_tokens(job);
        }
        job->code = runner_.queue_step(job->input, job->sampling,
                                       sources.empty() ? nullptr : sources.data(), &job->slot);
    });
    return true;
}

void StepPipeline::run(Job *job) {
    if (!abort_if_chained(job)) {
        guard(job, [&] { execute(job); });
        complete(job);
    }
}

bool StepPipeline::abort_if_chained(Job *job) {
    const bool aborts = job->is_chained && !is_last_good_;
    if (aborts) {
        job->code = LLAISYS_DECODE_ABORTED;
        complete(job);
    }
    return aborts;
}

// Runs a step and its sampling synchronously.
void StepPipeline::execute(Job *job) {
    if (job->caller_token_ids != nullptr) {
        std::copy_n(job->caller_token_ids, job->token_ids.size(), job->token_ids.begin());
    }
    resolve_tokens(job);
    std::vector<int32_t> ids(size_t(job->sampling.n_rows));
    job->code = runner_.execute_step(job->input, job->sampling, ids.data());
    if (job->code == LLAISYS_DECODE_OK) {
        job->ids = std::move(ids);
        store_logprobs(job);
        append_to_histories(*job);
    }
}

// is_newest: no later step is queued, so its logits are still available.
void StepPipeline::finish_queued(bool is_newest) {
    Job *job = queued_;
    if (job == nullptr) {
        return;
    }
    queued_ = nullptr;
    if (abort_if_chained(job)) {
        return;
    }
    guard(job, [&] {
        std::vector<int32_t> ids(size_t(job->sampling.n_rows));
        if (!runner_.finish_sample(job->slot, job->sampling, ids.data())) {
            n_sync_steps_ = kSyncStepsAfterRerun;
            ensure(can_rerun_, "a row of the step has no finite logit");
            if (!is_newest) {
                ensure(runner_.can_repeat(), "a row of the step has no finite logit");
                must_rerun_ = true;
                return execute(job);
            }
            runner_.sample(job->sampling, ids.data());
        }
        job->ids = std::move(ids);
        store_logprobs(job);
        append_to_histories(*job);
    });
    complete(job);
}

void StepPipeline::complete(Job *job) {
    is_last_good_ = job->status == LLAISYS_OK && job->code == LLAISYS_DECODE_OK;
    last_ticket_ = job->ticket;
    last_ids_ = job->ids;
    const std::lock_guard<std::mutex> lock(mutex_);
    job->is_done = true;
    --n_waiting_;
    changed_.notify_all();
}

// Stores an exception of body in the job.
template <typename Body> void StepPipeline::guard(Job *job, const Body &body) {
    try {
        if (!is_device_set_) {
            stream_.synchronize(); // sets the thread's current device
            is_device_set_ = true;
        }
        body();
    } catch (const Error &error) {
        job->status = error.status();
        job->error = error.what();
    } catch (const std::bad_alloc &) {
        job->status = LLAISYS_ERROR_MEMORY;
        job->error = "out of memory";
    } catch (const std::exception &error) {
        job->status = LLAISYS_ERROR_INTERNAL;
        job->error = error.what();
    }
}

// For each token that queued_ samples: its row there. Replaces such tokens by 0. Empty: none.
std::vector<int32_t> StepPipeline::sources_of(Job *job) const {
    const LlaisysSamplingMetadata &sampled = queued_->sampling;
    const int64_t n = job->ticket == queued_->ticket + 1 ? sampled.n_rows : 0;
    std::vector<int32_t> sources;
    for (size_t i = 0; i < job->token_ids.size(); ++i) {
        int64_t &token = job->token_ids[i];
        if (token < 0) {
            check_sampled(i, token, n);
            sources.resize(job->token_ids.size(), -1);
            const auto j = int32_t(-1 - token);
            sources[i] = runner_.sampled_row(sampled, j);
            token = 0;
        }
    }
    return sources;
}

// For each row whose history lacks a token that queued_ samples: the row of that token. Empty:
// none.
std::vector<int32_t> StepPipeline::pending_rows_of(const Job &job) const {
    std::vector<int32_t> pending;
    if (queued_ == nullptr || queued_->sampling.seq_ids == nullptr ||
        job.sampling.seq_ids == nullptr || job.sampling.n_rows < 0) {
        return pending;
    }
    const LlaisysSamplingMetadata &sampled = queued_->sampling;
    const size_t n = size_t(job.sampling.n_rows);
    std::unordered_map<int64_t, int32_t> rows;
    for (int32_t j = 0; j < sampled.n_rows; ++j) {
        if (runner_.sampler().has_history(sampled.seq_ids[j])) {
            rows[sampled.seq_ids[j]] = runner_.sampled_row(sampled, j);
        }
    }
    for (size_t r = 0; !rows.empty() && r < n; ++r) {
        const auto row = rows.find(job.sampling.seq_ids[r]);
        if (row != rows.end()) {
            pending.resize(n, -1);
            pending[r] = row->second;
        }
    }
    return pending;
}

// Replaces token -1 - j by the j-th id that the previous step sampled.
void StepPipeline::resolve_tokens(Job *job) const {
    const bool is_next = is_last_good_ && job->ticket == last_ticket_ + 1;
    const int64_t n = is_next ? int64_t(last_ids_.size()) : 0;
    for (size_t i = 0; i < job->token_ids.size(); ++i) {
        int64_t &token = job->token_ids[i];
        if (token < 0) {
            check_sampled(i, token, n);
            token = last_ids_[size_t(-1 - token)];
        }
    }
}

// Appends sampled ids to existing histories, for the penalties of the next step.
void StepPipeline::append_to_histories(const Job &job) {
    for (size_t r = 0; job.sampling.seq_ids != nullptr && r < job.ids.size(); ++r) {
        const int64_t id = job.ids[r];
        if (runner_.sampler().has_history(job.sampling.seq_ids[r])) {
            runner_.sampler().accept(job.sampling.seq_ids[r], &id, 1);
        }
    }
}

void StepPipeline::store_logprobs(Job *job) {
    const int32_t n = job->sampling.n_rows;
    for (int32_t r = 0; r < n; ++r) {
        const LlaisysLogprobs found = runner_.sampler().logprobs(r);
        if (found.n == 0) {
            continue;
        }
        job->logprobs.resize(size_t(n));
        job->logprobs[size_t(r)] = {found.sampled_rank,
                                    {found.ids, found.ids + found.n},
                                    {found.logprobs, found.logprobs + found.n}};
    }
}

} // namespace llaisys::runtime
