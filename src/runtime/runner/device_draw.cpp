#include "runtime/runner/device_draw.hpp"

#include "ops/argmax/op.hpp"

#include <algorithm>
#include <cmath>

namespace llaisys::runtime {

DeviceDraw::DeviceDraw(const device::Stream &stream) : stream_(stream), arena_(stream) {
    for (Draw &draw : draws_) {
        draw.is_done = stream.runtime().create_event(stream.device_id());
    }
}

DeviceDraw::~DeviceDraw() {
    for (const Room *room : {&draws_[0].room, &draws_[1].room, &reduced_, &rows_}) {
        if (room->host != nullptr) {
            stream_.runtime().release_host(room->host);
        }
    }
    for (const Draw &draw : draws_) {
        stream_.runtime().destroy_event(draw.is_done);
    }
}

void DeviceDraw::reserve(Room *room, int64_t bytes) {
    if (bytes <= room->bytes) {
        return;
    }
    if (room->host != nullptr) {
        stream_.synchronize(); // a copy into it may be under way
        stream_.runtime().release_host(room->host);
        room->host = nullptr;
    }
    room->device = std::make_shared<Storage>(stream_.type(), stream_.device_id(), bytes);
    room->host = static_cast<std::byte *>(stream_.runtime().allocate_host(size_t(bytes)));
    room->bytes = bytes;
}

void DeviceDraw::bring(const Room &room, int64_t bytes) {
    stream_.runtime().copy(room.host, room.device->data(), size_t(bytes),
                           device::CopyKind::device_to_host, stream_.native());
}

int DeviceDraw::queue(const Tensor &logits) {
    last_ = 1 - last_;
    Draw &draw = draws_[last_];
    const int64_t n = logits.defined() ? logits.size(0) : 0;
    constexpr int64_t kRowBytes = sizeof(int64_t) + sizeof(float);
    if (n > draw.capacity) {
        draw.capacity = std::max<int64_t>(n, 64);
        reserve(&draw.room, draw.capacity * kRowBytes);
    }
    if (n > 0) {
        const int64_t value_at = draw.capacity * int64_t(sizeof(int64_t));
        drawn_ = Tensor::on(draw.room.device, 0, {n}, LLAISYS_DTYPE_I64);
        ops::argmax(stream_, drawn_, Tensor::on(draw.room.device, value_at, {n}, LLAISYS_DTYPE_F32),
                    logits);
        bring(draw.room, draw.capacity * kRowBytes);
    }
    stream_.runtime().record_event(draw.is_done, stream_.native());
    return last_;
}

bool DeviceDraw::is_over(int place) const {
    return stream_.runtime().query_event(draws_[place].is_done);
}

bool DeviceDraw::finish(int place, const LlaisysSamplingMetadata &sampling, int32_t *ids) const {
    while (!is_over(place)) {
    }
    const Draw &draw = draws_[place];
    const auto *indices = reinterpret_cast<const int64_t *>(draw.room.host);
    const auto *values =
        reinterpret_cast<const float *>(draw.room.host + draw.capacity * int64_t(sizeof(int64_t)));
    const auto row_of = [&](int32_t r) { return sampling.rows != nullptr ? sampling.rows[r] : r; };
    for (int32_t r = 0; r < sampling.n_rows; ++r) {
        if (!(values[row_of(r)] > -INFINITY)) {
            return false;
        }
    }
    for (int32_t r = 0; r < sampling.n_rows; ++r) {
        ids[r] = int32_t(indices[row_of(r)]);
    }
    return true;
}

} // namespace llaisys::runtime
