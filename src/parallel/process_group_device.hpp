// Base of the process groups on GPUs: streams, order of calls, failure detection.
//
// A synchronous call is enqueued on the caller's stream and returns before it completes; an
// asynchronous call uses the group's stream.
#pragma once

#include "parallel/process_group.hpp"

#include <condition_variable>
#include <deque>
#include <thread>

namespace llaisys::parallel {

struct DeviceGroupState;
class DeviceWork;

class ProcessGroupDevice : public ProcessGroup {
public:
    void Abort(const std::string &reason) const noexcept override;
    void CheckResults() const override;

protected:
    // Several ranks also form a CPU group with `options.host_backend` and the same init_method, for
    // rendezvous and failure detection. options.stream must outlive the group.
    explicit ProcessGroupDevice(const GroupOptions &options);

    // The last step of a constructor: monitors the other ranks from now on.
    void start_watching();
    // The first step of a destructor: waits for pending calls, ends monitoring.
    void finish();

    // Throws when the device reports a failed collective. Called by the watching thread.
    virtual void check_device() const {}
    // Ends the kernels that wait for another rank. Called once, from any thread.
    virtual void abort_device() const noexcept = 0;

    // Enqueues a call; may set call->scratch.
    virtual void enqueue(Collective *call, const device::Stream &stream) const = 0;

    bool is_aborted() const;
    const device::Runtime &runtime() const { return runtime_; }
    const device::Stream &own_stream() const { return *own_stream_; } // of asynchronous calls
    const ProcessGroup &host() const { return *host_; }               // with several ranks only

private:
    WorkPtr submit(const Collective &call, bool is_async) const final;
    void InitStreams(); // 002 section 2.2
    void watch();

    const device::Runtime &runtime_;
    std::shared_ptr<const ProcessGroup> host_; // null: a group of one
    std::unique_ptr<device::Stream> own_stream_;
    std::shared_ptr<DeviceGroupState>
        state_;                             // shared with Work objects, which may outlive the group
    std::shared_ptr<DeviceWork> sync_work_; // of synchronous calls; complete with the latest one
    mutable std::deque<std::shared_ptr<DeviceWork>> pending_; // asynchronous calls, oldest first

    std::mutex watch_mutex_;
    std::condition_variable watch_ends_;
    bool is_ending_ = false;
    std::thread watcher_;
};

} // namespace llaisys::parallel
