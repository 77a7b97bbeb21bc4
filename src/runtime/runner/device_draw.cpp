#include "runtime/runner/device_draw.hpp"

#include "ops/argmax/op.hpp"

#include <algorithm>
#include <cmath>

namespace llaisys::runtime {

DeviceDraw::DeviceDraw(const device::Stream &stream)
    : stream_(stream), draws_{Draw(stream), Draw(stream)}, arena_(stream) {
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

void DeviceDraw::bring(const Room &room, int64_t bytes) {
    ops::bring_out(stream_, room.host, room.device->data(), bytes);
}

DeviceDraw::Draw &DeviceDraw::next(int64_t bytes) {
    Draw &draw = draws_[1 - last_];
    reserve(&draw.room, bytes);
    last_ = 1 - last_;
    draw.is_planned = false;
    draw.found = {};
    return draw;
}

int DeviceDraw::end(const Draw &draw) {
    stream_.runtime().record_event(draw.is_done, stream_.native());
    return last_;
}

int DeviceDraw::queue(const Tensor &logits) {
    const int64_t n = logits.defined() ? logits.size(0) : 0;
    const int64_t values_at = StepArena::bytes_for(n, sizeof(int64_t));
    const int64_t bytes = values_at + StepArena::bytes_for(n, sizeof(float));
    Draw &draw = next(bytes);
    if (n > 0) {
        drawn_ = Tensor::on(draw.room.device, 0, {n}, LLAISYS_DTYPE_I64);
        const Tensor values = Tensor::on(draw.room.device, values_at, {n}, LLAISYS_DTYPE_F32);
        const ops::ArgmaxOnHost host{reinterpret_cast<int64_t *>(draw.room.host),
                                     reinterpret_cast<float *>(draw.room.host + values_at)};
        ops::argmax(stream_, drawn_, values, logits, host);
        draw.ids = host.index;
        draw.values = host.value;
    }
    return end(draw);
}

bool DeviceDraw::is_over(int place) const {
    return stream_.runtime().query_event(draws_[place].is_done);
}

bool DeviceDraw::finish(int place, const LlaisysSamplingMetadata &sampling, int32_t *ids) const {
    while (!is_over(place)) {
    }
    const Draw &draw = draws_[place];
    const auto row_of = [&](int32_t r) {
        return !draw.is_planned && sampling.rows != nullptr ? sampling.rows[r] : r;
    };
    for (int32_t r = 0; r < sampling.n_rows; ++r) {
        const int32_t row = row_of(r);
        if (draw.is_planned ? draw.is_open[row] != 0 : !(draw.values[row] > -INFINITY)) {
            return false;
        }
    }
    for (int32_t r = 0; r < sampling.n_rows; ++r) {
        ids[r] = int32_t(draw.ids[row_of(r)]);
    }
    return true;
}

} // namespace llaisys::runtime
