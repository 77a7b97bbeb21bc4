// Sampling in ModelRunner: synchronous, or enqueued after its step.
#include "runtime/runner/model_runner.hpp"

#include <algorithm>
#include <limits>

namespace llaisys::runtime {

void ModelRunner::sample(const LlaisysSamplingMetadata &sampling, int32_t *ids) {
    const Profile::Scope scope = profile_.sample("sample/rows");
    const bool is_supported = device_sampler_.is_supported();
    if (is_supported) {
        sampler_.plan(sampling, output_.n_rows(), &plan_);
    }
    if (!is_supported || plan_.n_on_host == sampling.n_rows) {
        sampler_.sample(host_rows(), output_.n_rows(), sampling, ids);
        samples_.on_host += sampling.n_rows;
        return;
    }
    sampled_ids_.resize(size_t(sampling.n_rows));
    if (!finish_sample(device_sampler_.queue(output_.rows(), plan_), sampling,
                       sampled_ids_.data())) {
        std::vector<int32_t> outputs;
        for (const int32_t r : undecided_) {
            outputs.push_back(sampling.rows != nullptr ? sampling.rows[r] : r);
        }
        const float *rows = device_sampler_.copy_rows_to_host(output_.rows(), outputs);
        sampler_.sample_rows(rows, undecided_, sampling, sampled_ids_.data());
        samples_.on_host += int64_t(undecided_.size());
        samples_.on_device += sampling.n_rows - int64_t(undecided_.size());
    }
    std::copy(sampled_ids_.begin(), sampled_ids_.end(), ids);
}

SamplingPlan::Async ModelRunner::plan_sample(const LlaisysSamplingMetadata &sampling,
                                             const int32_t *pending_rows) {
    constexpr int32_t kAny = std::numeric_limits<int32_t>::max(); // rows are checked after the step
    if (!device_sampler_.is_supported() && !options_.samples_on_cpu) {
        const bool is_greedy = sampler_.plan_greedy(sampling, kAny, &plan_);
        return is_greedy ? SamplingPlan::Async::yes : SamplingPlan::Async::no;
    }
    sampler_.plan(sampling, kAny, &plan_, pending_rows);
    const bool may_be = plan_.async == SamplingPlan::Async::yes || can_repeat();
    return may_be ? plan_.async : SamplingPlan::Async::no;
}

int32_t ModelRunner::queue_step(const LlaisysStepInput &input,
                                const LlaisysSamplingMetadata &sampling, const int32_t *sources,
                                int *slot) {
    sources_ = sources;
    int32_t status = LLAISYS_DECODE_OK;
    try {
        status = step(input);
    } catch (...) {
        sources_ = nullptr;
        throw;
    }
    sources_ = nullptr;
    if (status == LLAISYS_DECODE_OK) {
        const Profile::Scope scope = profile_.sample("sample/queue");
        check_output_rows(sampling, output_.n_rows());
        *slot = device_sampler_.queue(sampling.n_rows > 0 ? output_.rows() : Tensor(), plan_);
    }
    return status;
}

bool ModelRunner::finish_sample(int slot, const LlaisysSamplingMetadata &sampling, int32_t *ids) {
    const Profile::Scope scope = profile_.sample("sample/collect");
    undecided_.clear();
    device_sampler_.finish(slot, sampling, ids, &undecided_);
    sampler_.record_sampled(device_sampler_.found(slot), sampling, ids);
    samples_.on_device += undecided_.empty() ? sampling.n_rows : 0;
    return undecided_.empty();
}

int32_t ModelRunner::execute_step(const LlaisysStepInput &input,
                                  const LlaisysSamplingMetadata &sampling, int32_t *ids) {
    const int32_t status = step(input);
    if (status == LLAISYS_DECODE_OK) {
        sample(sampling, ids);
    }
    return status;
}

} // namespace llaisys::runtime
