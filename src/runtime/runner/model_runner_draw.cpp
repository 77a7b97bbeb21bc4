// How a runner draws: at once, or queued behind its step.
#include "runtime/runner/model_runner.hpp"

#include <limits>

namespace llaisys::runtime {

void ModelRunner::sample(const LlaisysSamplingMetadata &sampling, int32_t *ids) {
    const Profile::Scope scope = profile_.sample();
    if (sample_on_device(sampling, ids)) {
        draws_.on_device += sampling.n_rows;
        return;
    }
    sampler_.sample(host_rows(), output_.n_rows(), sampling, ids);
    draws_.on_host += sampling.n_rows;
}

bool ModelRunner::sample_on_device(const LlaisysSamplingMetadata &sampling, int32_t *ids) {
    const int32_t needed =
        device_draw_.is_there() ? sampler_.best_needed(sampling, output_.n_rows()) : 0;
    if (needed == 1) {
        if (place_ < 0) {
            place_ = device_draw_.queue(output_.rows());
        }
        if (device_draw_.finish(place_, sampling, ids)) {
            sampler_.note_drawn(sampling.n_rows);
            return true;
        }
    } else if (needed > 1 && needed <= DeviceDraw::most_best(sampler_.vocab())) {
        const DeviceDraw::Best best = device_draw_.best_of(output_.rows());
        return sampler_.sample_best(best.ids, best.values, best.k, sampling, ids);
    }
    return false;
}

bool ModelRunner::can_queue(const LlaisysSamplingMetadata &sampling) const {
    // How many outputs there are is checked when they are there.
    return sampling.n_rows == 0 ||
           sampler_.best_needed(sampling, std::numeric_limits<int32_t>::max()) == 1;
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
        sampler_.best_needed(sampling, output_.n_rows()); // throws for rows that are not there
        *place = device_draw_.queue(sampling.n_rows > 0 ? output_.rows() : Tensor());
        place_ = sampling.n_rows > 0 ? *place : -1;
    }
    return status;
}

bool ModelRunner::finish_draw(int place, const LlaisysSamplingMetadata &sampling, int32_t *ids) {
    const Profile::Scope scope = profile_.sample();
    const bool is_drawn = device_draw_.finish(place, sampling, ids);
    if (is_drawn) {
        draws_.on_device += sampling.n_rows;
        sampler_.note_drawn(sampling.n_rows);
    }
    return is_drawn;
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
