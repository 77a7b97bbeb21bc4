// Handle of a started collective.
#pragma once

#include <chrono>
#include <condition_variable>
#include <exception>
#include <mutex>

namespace llaisys::parallel {

// Usable from any thread and in any order relative to other Work objects.
class Work {
public:
    virtual ~Work() = default;

    // Waits for completion, or for `timeout` when it is not zero. True: success. False: timed out
    // (the call continues) or failed (see exception).
    virtual bool
    WaitBlocking(std::chrono::milliseconds timeout = std::chrono::milliseconds::zero()) = 0;
    // Orders later work on the caller's stream after the call. On a GPU only the stream waits; on a
    // CPU the caller blocks. False: the call failed.
    virtual bool WaitNonBlocking() = 0;

    virtual bool IsCompleted() const = 0; // succeeded or failed
    virtual bool IsSuccess() const = 0;
    // Waits for completion and rethrows a failure.
    virtual void Synchronize() const = 0;
    virtual std::exception_ptr exception() const = 0; // null while running and on success

    // Device events, null on a CPU: the input is ready; the output is ready.
    virtual void *ready_event() const = 0;
    virtual void *done_event() const = 0;
};

// Work that runs on a thread of this process.
class HostWork final : public Work {
public:
    bool WaitBlocking(std::chrono::milliseconds timeout) override;
    bool WaitNonBlocking() override;
    bool IsCompleted() const override;
    bool IsSuccess() const override;
    void Synchronize() const override;
    std::exception_ptr exception() const override;
    void *ready_event() const override { return nullptr; }
    void *done_event() const override { return nullptr; }

    // Called once, by the thread that runs the work; null: success.
    void Finish(std::exception_ptr error);

private:
    mutable std::mutex mutex_;
    mutable std::condition_variable done_;
    bool is_done_ = false;
    std::exception_ptr error_;
};

} // namespace llaisys::parallel
