#include "parallel/process_group_device.hpp"

#include "parallel/utils.hpp"

#include <atomic>

namespace llaisys::parallel {

using std::chrono::milliseconds;
using std::chrono::steady_clock;

namespace {

constexpr milliseconds kDevicePoll{1};
constexpr milliseconds kWatchInterval{100};
// Time for running calls to return before abort_device().
constexpr milliseconds kAbortGracePeriod{2000};

} // namespace

// Abort state of a group, shared with its Work objects.
struct DeviceGroupState {
    AbortReason aborted;
    std::atomic<int> calls{0}; // being enqueued
};

class DeviceWork final : public Work {
public:
    DeviceWork(const GroupOptions &options, std::shared_ptr<DeviceGroupState> state)
        : runtime_(device::runtime_of(options.device)), stream_(*options.stream),
          state_(std::move(state)), ready_(runtime_.create_event(options.device_id)),
          done_(runtime_.create_event(options.device_id)) {}
    ~DeviceWork() override {
        runtime_.destroy_event(ready_);
        runtime_.destroy_event(done_);
    }

    bool WaitBlocking(milliseconds timeout) override {
        const auto start = steady_clock::now();
        while (!IsCompleted()) {
            if (timeout.count() > 0 && steady_clock::now() - start > timeout) {
                return false;
            }
            std::this_thread::sleep_for(kDevicePoll);
        }
        return IsSuccess();
    }
    bool WaitNonBlocking() override {
        runtime_.wait_event(done_, stream_.native());
        return !state_->aborted.is_set();
    }
    bool IsCompleted() const override {
        return state_->aborted.is_set() || runtime_.query_event(done_);
    }
    std::exception_ptr exception() const override {
        try {
            state_->aborted.throw_if_set();
        } catch (...) {
            return std::current_exception();
        }
        return nullptr;
    }
    // Keeps the tensors of the call alive until it is complete.
    void hold(Collective call) { call_ = std::move(call); }
    void *ready_event() const override { return ready_; }
    void *done_event() const override { return done_; }

private:
    const device::Runtime &runtime_;
    const device::Stream &stream_; // the caller's
    std::shared_ptr<DeviceGroupState> state_;
    Collective call_{};
    void *ready_;
    void *done_;
};

ProcessGroupDevice::ProcessGroupDevice(const GroupOptions &options)
    : ProcessGroup(options), runtime_(device::runtime_of(options.device)),
      state_(std::make_shared<DeviceGroupState>()) {
    require(options.stream != nullptr && options.stream->type() == options.device &&
                options.stream->device_id() == options.device_id,
            "group ", name(), ": its calls need a stream of device ", options.device_id);
    InitStreams();
    if (size() == 1) {
        return;
    }
    GroupOptions on_host = options;
    on_host.name += " on the host";
    on_host.device = LLAISYS_DEVICE_CPU;
    on_host.device_id = 0;
    on_host.stream = nullptr;
    host_ = ProcessGroupFactory::Instance().GetOrCreate(options.host_backend, on_host);
}

void ProcessGroupDevice::InitStreams() {
    const GroupOptions &given = options();
    own_stream_ = std::make_unique<device::Stream>(given.device, given.device_id, 1);
    sync_work_ = std::make_shared<DeviceWork>(given, state_);
}

void ProcessGroupDevice::start_watching() {
    if (size() > 1) {
        watcher_ = std::thread([this] { watch(); });
    }
}

void ProcessGroupDevice::finish() {
    if (!is_aborted()) {
        try {
            own_stream_->synchronize();
            options().stream->synchronize();
        } catch (const Error &) { // the device is lost; its other users report the error
        }
    }
    {
        std::lock_guard<std::mutex> lock(watch_mutex_);
        is_ending_ = true;
    }
    watch_ends_.notify_all();
    if (watcher_.joinable()) {
        watcher_.join();
    }
}

// Aborts the group when a rank is lost: kernels on the other GPUs would wait forever.
void ProcessGroupDevice::watch() {
    std::unique_lock<std::mutex> lock(watch_mutex_);
    while (!watch_ends_.wait_for(lock, kWatchInterval, [this] { return is_ending_; })) {
        if (is_aborted()) {
            return;
        }
        try {
            host_->CheckPeers();
            check_device();
        } catch (const Error &error) {
            Abort(error.what());
            return;
        }
    }
}

void ProcessGroupDevice::Abort(const std::string &reason) const noexcept {
    if (!state_->aborted.set(reason)) { // later calls throw
        return;
    }
    if (host_ != nullptr) {
        host_->Abort(reason);
    }
    const auto start = steady_clock::now();
    while (state_->calls.load() > 0 && steady_clock::now() - start < kAbortGracePeriod) {
        std::this_thread::sleep_for(kDevicePoll);
    }
    abort_device();
}

bool ProcessGroupDevice::is_aborted() const { return state_->aborted.is_set(); }

void ProcessGroupDevice::CheckResults() const { state_->aborted.throw_if_set(); }

WorkPtr ProcessGroupDevice::submit(const Collective &given, bool is_async) const {
    while (!pending_.empty() && pending_.front()->IsCompleted()) {
        pending_.pop_front();
    }
    const device::Stream &stream = *options().stream;
    const device::Stream &used = is_async ? *own_stream_ : stream;
    const auto work = is_async ? std::make_shared<DeviceWork>(options(), state_) : sync_work_;
    Collective call = given;
    state_->calls.fetch_add(1);
    try {
        state_->aborted.throw_if_set();
        if (is_async) {
            runtime_.record_event(work->ready_event(), stream.native());
            runtime_.wait_event(work->ready_event(), used.native());
        } else if (!pending_.empty()) {
            pending_.back()->WaitNonBlocking();
        }
        enqueue(&call, used);
        runtime_.record_event(work->done_event(), used.native());
    } catch (const Error &error) {
        state_->calls.fetch_sub(1);
        const CallSite site{call.type, options(), rank()};
        const std::string reason = text(site.text(), ": ", error.what());
        Abort(error.what());
        fail(error.status(), reason);
    }
    state_->calls.fetch_sub(1);
    if (is_async) {
        work->hold(std::move(call));
        pending_.push_back(work);
    }
    return work;
}

} // namespace llaisys::parallel
