// A call enqueued by ProcessGroupDevice, and the state it shares with the group.
#pragma once

#include "parallel/process_group.hpp"

#include <atomic>
#include <thread>

namespace llaisys::parallel {

constexpr std::chrono::milliseconds kDevicePoll{1};

// Abort state of a group, shared with its Work objects.
struct DeviceGroupState {
    std::atomic<bool> is_aborted{false};
    std::atomic<int> calls{0}; // being enqueued
    std::mutex mutex;
    std::string reason; // valid once aborted

    void throw_if_aborted() {
        if (is_aborted.load()) {
            std::lock_guard<std::mutex> lock(mutex);
            fail(LLAISYS_ERROR_INTERNAL, reason);
        }
    }
};

class DeviceWork final : public Work {
public:
    DeviceWork(const GroupOptions &options, std::shared_ptr<DeviceGroupState> state,
               std::vector<tensor_t> tensors)
        : runtime_(device::runtime_of(options.device)), stream_(*options.stream),
          state_(std::move(state)), tensors_(std::move(tensors)),
          ready_(runtime_.create_event(options.device_id)),
          done_(runtime_.create_event(options.device_id)) {}
    ~DeviceWork() override {
        runtime_.destroy_event(ready_);
        runtime_.destroy_event(done_);
    }

    bool WaitBlocking(std::chrono::milliseconds timeout) override {
        const auto start = std::chrono::steady_clock::now();
        while (!IsCompleted()) {
            if (timeout.count() > 0 && std::chrono::steady_clock::now() - start > timeout) {
                return false;
            }
            std::this_thread::sleep_for(kDevicePoll);
        }
        return IsSuccess();
    }
    bool WaitNonBlocking() override {
        runtime_.wait_event(done_, stream_.native());
        return !state_->is_aborted.load();
    }
    bool IsCompleted() const override {
        return state_->is_aborted.load() || runtime_.query_event(done_);
    }
    bool IsSuccess() const override {
        return !state_->is_aborted.load() && runtime_.query_event(done_);
    }
    void Synchronize() const override {
        const_cast<DeviceWork *>(this)->WaitBlocking(std::chrono::milliseconds::zero());
        state_->throw_if_aborted();
    }
    std::exception_ptr exception() const override {
        try {
            state_->throw_if_aborted();
        } catch (...) {
            return std::current_exception();
        }
        return nullptr;
    }
    void *ready_event() const override { return ready_; }
    void *done_event() const override { return done_; }

private:
    const device::Runtime &runtime_;
    const device::Stream &stream_; // the caller's
    std::shared_ptr<DeviceGroupState> state_;
    std::vector<tensor_t> tensors_; // kept alive until the call is complete
    void *ready_;
    void *done_;
};

} // namespace llaisys::parallel
