#include "runtime/runner/device_sampler.hpp"

#include "ops/argmax/op.hpp"

#include <algorithm>
#include <cmath>

namespace llaisys::runtime {

DeviceSampler::DeviceSampler(const device::Stream &stream)
    : stream_(stream), samples_{Sample(stream), Sample(stream)}, arena_(stream) {
    for (Sample &sample : samples_) {
        sample.done_event = stream.runtime().create_event(stream.device_id());
    }
}

DeviceSampler::~DeviceSampler() {
    for (const StagingBuffer *staging :
         {&samples_[0].staging, &samples_[1].staging, &reduced_, &rows_}) {
        if (staging->host != nullptr) {
            stream_.runtime().release_host(staging->host);
        }
    }
    for (const Sample &sample : samples_) {
        stream_.runtime().destroy_event(sample.done_event);
    }
}

void DeviceSampler::reserve(StagingBuffer *staging, int64_t bytes) {
    if (bytes <= staging->bytes) {
        return;
    }
    bytes = std::max<int64_t>({bytes, 2 * staging->bytes, 1024});
    if (staging->host != nullptr) {
        stream_.synchronize(); // a copy into it may be in flight
        stream_.runtime().release_host(staging->host);
        *staging = {}; // if the allocation below throws
    }
    staging->device = std::make_shared<Storage>(stream_.type(), stream_.device_id(), bytes);
    staging->host = static_cast<std::byte *>(stream_.runtime().allocate_host(size_t(bytes)));
    staging->bytes = bytes;
}

void DeviceSampler::copy_to_host(const StagingBuffer &staging, int64_t bytes) {
    ops::bring_out(stream_, staging.host, staging.device->data(), bytes);
}

DeviceSampler::Sample &DeviceSampler::acquire(int64_t bytes) {
    Sample &sample = samples_[1 - last_];
    reserve(&sample.staging, bytes);
    last_ = 1 - last_;
    sample.is_planned = false;
    sample.found = {};
    return sample;
}

int DeviceSampler::record_done(const Sample &sample) {
    stream_.runtime().record_event(sample.done_event, stream_.native());
    return last_;
}

int DeviceSampler::queue(const Tensor &logits) {
    const int64_t n = logits.defined() ? logits.size(0) : 0;
    const int64_t values_at = StepArena::bytes_for(n, sizeof(int64_t));
    const int64_t bytes = values_at + StepArena::bytes_for(n, sizeof(float));
    Sample &sample = acquire(bytes);
    if (n > 0) {
        sampled_ = Tensor::on(sample.staging.device, 0, {n}, LLAISYS_DTYPE_I64);
        const Tensor values = Tensor::on(sample.staging.device, values_at, {n}, LLAISYS_DTYPE_F32);
        const ops::ArgmaxOnHost host{reinterpret_cast<int64_t *>(sample.staging.host),
                                     reinterpret_cast<float *>(sample.staging.host + values_at)};
        ops::argmax(stream_, sampled_, values, logits, host);
        sample.ids = host.index;
        sample.values = host.value;
    }
    return record_done(sample);
}

bool DeviceSampler::is_done(int slot) const {
    return stream_.runtime().query_event(samples_[slot].done_event);
}

bool DeviceSampler::finish(int slot, const LlaisysSamplingMetadata &sampling, int32_t *ids) const {
    while (!is_done(slot)) {
    }
    const Sample &sample = samples_[slot];
    const auto row_of = [&](int32_t r) {
        return !sample.is_planned && sampling.rows != nullptr ? sampling.rows[r] : r;
    };
    for (int32_t r = 0; r < sampling.n_rows; ++r) {
        const int32_t row = row_of(r);
        if (sample.is_planned ? sample.is_undecided[row] != 0 : !(sample.values[row] > -INFINITY)) {
            return false;
        }
    }
    for (int32_t r = 0; r < sampling.n_rows; ++r) {
        ids[r] = int32_t(sample.ids[row_of(r)]);
    }
    return true;
}

} // namespace llaisys::runtime
