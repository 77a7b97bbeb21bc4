#include "runtime/runner/step_arena.hpp"

#include <algorithm>

namespace llaisys::runtime {

StepArena::StepArena(const device::Stream &stream)
    : stream_(stream), device_(stream.type(), stream.device_id()),
      uploaded_(stream.runtime().create_event(stream.device_id())) {}

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
    device_.begin();
    if (bytes <= host_bytes_) {
        return;
    }
    constexpr int64_t kSmallest = 4096;
    const int64_t wanted = std::max({bytes, 2 * host_bytes_, kSmallest});
    device_.reserve(wanted);
    if (stream_.type() == LLAISYS_DEVICE_CPU) {
        host_ = device_.data();
    } else {
        if (host_ != nullptr) {
            stream_.runtime().release_host(host_);
            host_ = nullptr;
            host_bytes_ = 0; // if the allocation below throws
        }
        host_ = static_cast<std::byte *>(stream_.runtime().allocate_host(size_t(wanted)));
    }
    host_bytes_ = wanted;
}

void *StepArena::allocate_bytes(const Shape &shape, DType dtype, Tensor *tensor) {
    *tensor = device_.allocate(shape, dtype);
    return host_ + (tensor->data() - device_.data());
}

void StepArena::upload(const ops::SampledTokens *sampled) {
    if (device_.used() == 0) {
        return;
    }
    ops::bring_in(stream_, device_.data(), host_, device_.used(), sampled);
    if (stream_.type() == LLAISYS_DEVICE_CPU) {
        return;
    }
    stream_.runtime().record_event(uploaded_, stream_.native());
    is_uploading_ = true;
}

} // namespace llaisys::runtime
