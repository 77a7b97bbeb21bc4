#include "runtime/runner/device_sampler.hpp"

#include "ops/argmax/op.hpp"

#include <algorithm>
#include <cmath>

namespace llaisys::runtime {

DeviceSampler::DeviceSampler(const device::Stream &stream)
    : stream_(stream), samples_{Sample(stream), Sample(stream)}, arena_(stream) {
    for (Sample &sample : samples_) {
        sample.is_done = stream.runtime().create_event(stream.device_id());
    }
}

DeviceSampler::~DeviceSampler() {
    for (const Room *room : {&samples_[0].room, &samples_[1].room, &reduced_, &rows_}) {
        if (room->host != nullptr) {
            stream_.runtime().release_host(room->host);
        }
    }
    for (const Sample &sample : samples_) {
        stream_.runtime().destroy_event(sample.is_done);
    }
}

void DeviceSampler::reserve(Room *room, int64_t bytes) {
    if (bytes <= room->bytes) {
        return;
    }
    bytes = std::max<int64_t>({bytes, 2 * room->bytes, 1024});
    if (room->host != nullptr) {
        stream_.synchronize(); // a copy into it may be under way
        stream_.runtime().release_host(room->host);
        *room = {}; // should there be no memory for more
    }
    room->device = std::make_shared<Storage>(stream_.type(), stream_.device_id(), bytes);
    room->host = static_cast<std::byte *>(stream_.runtime().allocate_host(size_t(bytes)));
    room->bytes = bytes;
}

void DeviceSampler::bring(const Room &room, int64_t bytes) {
    ops::bring_out(stream_, room.host, room.device->data(), bytes);
}

DeviceSampler::Sample &DeviceSampler::next(int64_t bytes) {
    Sample &sample = samples_[1 - last_];
    reserve(&sample.room, bytes);
    last_ = 1 - last_;
    sample.is_planned = false;
    sample.found = {};
    return sample;
}

int DeviceSampler::end(const Sample &sample) {
    stream_.runtime().record_event(sample.is_done, stream_.native());
    return last_;
}

int DeviceSampler::queue(const Tensor &logits) {
    const int64_t n = logits.defined() ? logits.size(0) : 0;
    const int64_t values_at = StepArena::bytes_for(n, sizeof(int64_t));
    const int64_t bytes = values_at + StepArena::bytes_for(n, sizeof(float));
    Sample &sample = next(bytes);
    if (n > 0) {
        sampled_ = Tensor::on(sample.room.device, 0, {n}, LLAISYS_DTYPE_I64);
        const Tensor values = Tensor::on(sample.room.device, values_at, {n}, LLAISYS_DTYPE_F32);
        const ops::ArgmaxOnHost host{reinterpret_cast<int64_t *>(sample.room.host),
                                     reinterpret_cast<float *>(sample.room.host + values_at)};
        ops::argmax(stream_, sampled_, values, logits, host);
        sample.ids = host.index;
        sample.values = host.value;
    }
    return end(sample);
}

bool DeviceSampler::is_over(int place) const {
    return stream_.runtime().query_event(samples_[place].is_done);
}

bool DeviceSampler::finish(int place, const LlaisysSamplingMetadata &sampling, int32_t *ids) const {
    while (!is_over(place)) {
    }
    const Sample &sample = samples_[place];
    const auto row_of = [&](int32_t r) {
        return !sample.is_planned && sampling.rows != nullptr ? sampling.rows[r] : r;
    };
    for (int32_t r = 0; r < sampling.n_rows; ++r) {
        const int32_t row = row_of(r);
        if (sample.is_planned ? sample.is_open[row] != 0 : !(sample.values[row] > -INFINITY)) {
            return false;
        }
    }
    for (int32_t r = 0; r < sampling.n_rows; ++r) {
        ids[r] = int32_t(sample.ids[row_of(r)]);
    }
    return true;
}

} // namespace llaisys::runtime
