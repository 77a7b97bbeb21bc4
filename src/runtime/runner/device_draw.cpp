#include "runtime/runner/device_draw.hpp"

#include "ops/argmax/op.hpp"

#include <algorithm>
#include <cmath>

namespace llaisys::runtime {

DeviceDraw::~DeviceDraw() {
    if (host_ != nullptr) {
        stream_.runtime().release_host(host_);
    }
}

void DeviceDraw::reserve(int64_t n_rows) {
    if (n_rows <= capacity_) {
        return;
    }
    if (host_ != nullptr) {
        stream_.runtime().release_host(host_);
        host_ = nullptr;
    }
    capacity_ = std::max<int64_t>(n_rows, 64);
    const int64_t index_bytes = bytes_of(LLAISYS_DTYPE_I64, capacity_);
    const int64_t bytes = index_bytes + bytes_of(LLAISYS_DTYPE_F32, capacity_);
    const auto memory = std::make_shared<Storage>(stream_.type(), stream_.device_id(), bytes);
    index_ = Tensor::on(memory, 0, {capacity_}, LLAISYS_DTYPE_I64);
    value_ = Tensor::on(memory, index_bytes, {capacity_}, LLAISYS_DTYPE_F32);
    host_ = static_cast<std::byte *>(stream_.runtime().allocate_host(size_t(bytes)));
}

void DeviceDraw::queue(const Tensor &logits) {
    const int64_t n = logits.size(0);
    reserve(n);
    ops::argmax(stream_, index_.slice(0, 0, n), value_.slice(0, 0, n), logits);
    stream_.runtime().copy(host_, index_.data(), size_t(index_.bytes() + value_.bytes()),
                           device::CopyKind::device_to_host, stream_.native());
}

bool DeviceDraw::finish(const LlaisysSamplingMetadata &sampling, int32_t *ids) const {
    stream_.synchronize();
    const auto *indices = reinterpret_cast<const int64_t *>(host_);
    const auto *values = reinterpret_cast<const float *>(host_ + index_.bytes());
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
