#include "runtime/runner/step_arena.hpp"

#include <algorithm>

namespace llaisys::runtime {

StepArena::StepArena(const device::Stream &stream)
    : stream_(stream), uploaded_(stream.runtime().create_event(stream.device_id())) {}

StepArena::~StepArena() {
    if (stream_.type() != LLAISYS_DEVICE_CPU && host_ != nullptr) {
        stream_.runtime().release_host(host_);
    }
    stream_.runtime().destroy_event(uploaded_);
}

void StepArena::begin(int64_t bytes) {
    while (is_uploading_ && !stream_.runtime().query_event(uploaded_)) {
    }
    is_uploading_ = false;
    used_ = 0;
    if (bytes <= capacity_) {
        return;
    }
    constexpr int64_t kSmallest = 4096;
    const int64_t wanted = std::max({bytes, 2 * capacity_, kSmallest});
    auto device = std::make_shared<Storage>(stream_.type(), stream_.device_id(), wanted);
    capacity_ = 0; // if the allocation below throws
    device_ = std::move(device);
    if (stream_.type() == LLAISYS_DEVICE_CPU) {
        host_ = device_->data();
    } else {
        if (host_ != nullptr) {
            stream_.runtime().release_host(host_);
            host_ = nullptr;
        }
        host_ = static_cast<std::byte *>(stream_.runtime().allocate_host(size_t(wanted)));
    }
    capacity_ = wanted;
    ++generation_;
}

void *StepArena::allocate_bytes(const Shape &shape, DType dtype, Tensor *tensor) {
    const int64_t bytes = bytes_for(bytes_of(dtype, shape.elements()), 1);
    ensure(used_ + bytes <= capacity_, "step arena of ", capacity_, " bytes has ",
           capacity_ - used_, " left, ", bytes, " are needed");
    *tensor = Tensor::on(device_, used_, shape, dtype);
    void *host = host_ + used_;
    used_ += bytes;
    return host;
}

void StepArena::upload(const ops::SampledTokens *sampled) {
    if (used_ == 0) {
        return;
    }
    ops::bring_in(stream_, device_->data(), host_, used_, sampled);
    if (stream_.type() == LLAISYS_DEVICE_CPU) {
        return;
    }
    stream_.runtime().record_event(uploaded_, stream_.native());
    is_uploading_ = true;
}

} // namespace llaisys::runtime
