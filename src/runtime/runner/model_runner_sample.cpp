// Sampling in ModelRunner: synchronous, or enqueued after its step.
#include "runtime/runner/model_runner.hpp"

#include <limits>

namespace llaisys::runtime {

void ModelRunner::sample(const LlaisysSamplingMetadata &sampling, int32_t *ids) {
    const Profile::Scope scope = profile_.sample();
    int32_t on_host = device_sampler_.is_supported() && sampling.n_rows > 0
                          ? sample_on_device(sampling, ids)
                          : -1;
    if (on_host < 0) {
        sampler_.sample(host_rows(), output_.n_rows(), sampling, ids);
        on_host = sampling.n_rows;
    }
    samples_.on_host += on_host;
    samples_.on_device += sampling.n_rows - on_host;
}

int32_t ModelRunner::sample_on_device(const LlaisysSamplingMetadata &sampling, int32_t *ids) {
    if (sampler_.is_greedy(sampling, output_.n_rows())) {
        if (sample_slot_ < 0) {
            sample_slot_ = device_sampler_.queue(output_.rows());
        }
        if (!device_sampler_.finish(sample_slot_, sampling, ids)) {
            return -1;
        }
        sampler_.record_sampled(sampling.n_rows);
        return 0;
    }
    const int64_t k = DeviceSampler::max_top_k(sampler_.vocab());
    if (!sampler_.plan(sampling, output_.n_rows(), k, &plan_)) {
        return -1;
    }
    const Tensor logits = output_.rows();
    if (plan_.async != SamplingPlan::Async::no &&
        take_sample(device_sampler_.queue(logits, plan_), sampling, ids)) {
        return 0;
    }
    const ReducedRows found = device_sampler_.reduce(logits, plan_);
    const auto fetch = [&](const std::vector<int32_t> &rows) {
        return device_sampler_.copy_rows_to_host(logits, rows);
    };
    return sampler_.sample_reduced(found, fetch, sampling, ids);
}

SamplingPlan::Async ModelRunner::plan_sample(const LlaisysSamplingMetadata &sampling,
                                             const int32_t *pending_rows) {
    constexpr int32_t kAny = std::numeric_limits<int32_t>::max(); // rows are checked after the step
    is_greedy_ = sampler_.is_greedy(sampling, kAny);
    if (is_greedy_) {
        return SamplingPlan::Async::yes;
    }
    if (!device_sampler_.is_supported() && !options_.samples_on_cpu) {
        return SamplingPlan::Async::no;
    }
    sampler_.plan(sampling, kAny, DeviceSampler::max_top_k(sampler_.vocab()), &plan_, pending_rows);
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
        const Profile::Scope scope = profile_.sample();
        check_output_rows(sampling, output_.n_rows());
        if (is_greedy_) {
            *slot = device_sampler_.queue(sampling.n_rows > 0 ? output_.rows() : Tensor());
            sample_slot_ = sampling.n_rows > 0 ? *slot : -1;
        } else {
            *slot = device_sampler_.queue(output_.rows(), plan_);
        }
    }
    return status;
}

bool ModelRunner::finish_sample(int slot, const LlaisysSamplingMetadata &sampling, int32_t *ids) {
    const Profile::Scope scope = profile_.sample();
    const bool is_sampled = take_sample(slot, sampling, ids);
    samples_.on_device += is_sampled ? sampling.n_rows : 0;
    return is_sampled;
}

bool ModelRunner::take_sample(int slot, const LlaisysSamplingMetadata &sampling, int32_t *ids) {
    if (!device_sampler_.finish(slot, sampling, ids)) {
        return false;
    }
    const SampledRows &found = device_sampler_.found(slot);
    found.ids != nullptr ? sampler_.record_sampled(found, sampling, ids)
                         : sampler_.record_sampled(sampling.n_rows);
    return true;
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
