// How a runner samples: at once, or queued behind its step.
#include "runtime/runner/model_runner.hpp"

#include <limits>

namespace llaisys::runtime {

void ModelRunner::sample(const LlaisysSamplingMetadata &sampling, int32_t *ids) {
    const Profile::Scope scope = profile_.sample();
    int32_t on_host =
        device_sampler_.is_there() && sampling.n_rows > 0 ? sample_on_device(sampling, ids) : -1;
    if (on_host < 0) {
        sampler_.sample(host_rows(), output_.n_rows(), sampling, ids);
        on_host = sampling.n_rows;
    }
    samples_.on_host += on_host;
    samples_.on_device += sampling.n_rows - on_host;
}

int32_t ModelRunner::sample_on_device(const LlaisysSamplingMetadata &sampling, int32_t *ids) {
    if (sampler_.takes_best(sampling, output_.n_rows())) {
        if (place_ < 0) {
            place_ = device_sampler_.queue(output_.rows());
        }
        if (!device_sampler_.finish(place_, sampling, ids)) {
            return -1;
        }
        sampler_.note_sampled(sampling.n_rows);
        return 0;
    }
    const int64_t k = DeviceSampler::most_best(sampler_.vocab());
    if (!sampler_.plan(sampling, output_.n_rows(), k, &plan_)) {
        return -1;
    }
    const Tensor logits = output_.rows();
    const ReducedRows found = device_sampler_.reduce(logits, plan_);
    const auto fetch = [&](const std::vector<int32_t> &rows) {
        return device_sampler_.bring_rows(logits, rows);
    };
    return sampler_.sample_reduced(found, fetch, sampling, ids);
}

SamplingPlan::Ahead ModelRunner::plan_sample(const LlaisysSamplingMetadata &sampling,
                                             const int32_t *late_rows) {
    constexpr int32_t kAny = std::numeric_limits<int32_t>::max(); // checked when they are there
    takes_best_ = sampler_.takes_best(sampling, kAny);
    if (takes_best_) {
        return SamplingPlan::Ahead::surely;
    }
    if (!device_sampler_.is_there() && !options_.samples_on_cpu) {
        return SamplingPlan::Ahead::no;
    }
    sampler_.plan(sampling, kAny, DeviceSampler::most_best(sampler_.vocab()), &plan_, late_rows);
    const bool may_be = plan_.ahead == SamplingPlan::Ahead::surely || can_repeat();
    return may_be ? plan_.ahead : SamplingPlan::Ahead::no;
}

int32_t ModelRunner::queue_step(const LlaisysStepInput &input,
                                const LlaisysSamplingMetadata &sampling, const int32_t *sources,
                                int *place) {
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
        if (takes_best_) {
            *place = device_sampler_.queue(sampling.n_rows > 0 ? output_.rows() : Tensor());
            place_ = sampling.n_rows > 0 ? *place : -1;
        } else {
            *place = device_sampler_.queue(output_.rows(), plan_);
        }
    }
    return status;
}

bool ModelRunner::finish_sample(int place, const LlaisysSamplingMetadata &sampling, int32_t *ids) {
    const Profile::Scope scope = profile_.sample();
    const bool is_sampled = device_sampler_.finish(place, sampling, ids);
    if (is_sampled) {
        samples_.on_device += sampling.n_rows;
        const SampledRows &found = device_sampler_.found(place);
        found.ids != nullptr ? sampler_.note_sampled(found, sampling, ids)
                             : sampler_.note_sampled(sampling.n_rows);
    }
    return is_sampled;
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
