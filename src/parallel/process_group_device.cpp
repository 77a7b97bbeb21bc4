#include "parallel/process_group_device.hpp"

#include "parallel/utils.hpp"
#include "parallel/work_device.hpp"

namespace llaisys::parallel {

using std::chrono::milliseconds;
using std::chrono::steady_clock;

namespace {

constexpr milliseconds kWatchInterval{100};
// Time for running calls to return before abort_device().
constexpr milliseconds kAbortGracePeriod{2000};

} // namespace

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
    sync_work_ = std::make_shared<DeviceWork>(given, state_, std::vector<tensor_t>());
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
    {
        std::lock_guard<std::mutex> lock(state_->mutex);
        if (is_aborted()) {
            return;
        }
        state_->reason = reason;
        state_->is_aborted.store(true); // later calls throw
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

bool ProcessGroupDevice::is_aborted() const { return state_->is_aborted.load(); }

void ProcessGroupDevice::CheckResults() const { state_->throw_if_aborted(); }

std::shared_ptr<Work>
ProcessGroupDevice::submit(const char *call, bool async_op, std::initializer_list<tensor_t> tensors,
                           const std::function<void(const device::Stream &)> &body) const {
    while (!pending_.empty() && pending_.front()->IsCompleted()) {
        pending_.pop_front();
    }
    const device::Stream &stream = *options().stream;
    const device::Stream &used = async_op ? *own_stream_ : stream;
    const std::shared_ptr<Work> work =
        async_op ? std::make_shared<DeviceWork>(options(), state_, tensors) : sync_work_;
    state_->calls.fetch_add(1);
    try {
        state_->throw_if_aborted();
        if (async_op) {
            runtime_.record_event(work->ready_event(), stream.native());
            runtime_.wait_event(work->ready_event(), used.native());
        } else if (!pending_.empty()) {
            pending_.back()->WaitNonBlocking();
        }
        body(used);
        runtime_.record_event(work->done_event(), used.native());
    } catch (const Error &error) {
        state_->calls.fetch_sub(1);
        const CallSite site{call, options(), rank()};
        const std::string reason = text(site.text(), ": ", error.what());
        Abort(error.what());
        fail(error.status(), reason);
    }
    state_->calls.fetch_sub(1);
    if (async_op) {
        pending_.push_back(work);
    }
    return work;
}

} // namespace llaisys::parallel
