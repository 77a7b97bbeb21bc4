// A collective that was started: who started it may wait for it, or look whether it is over.
#pragma once

#include <chrono>
#include <condition_variable>
#include <exception>
#include <mutex>

namespace llaisys::parallel {

// May be used from any thread, and in any order among works.
class Work {
public:
    virtual ~Work() = default;

    // Waits until it is over, or for `timeout` when that is not zero. True: it is over and went
    // well. False: time is up (it goes on), or it failed (see exception).
    virtual bool
    WaitBlocking(std::chrono::milliseconds timeout = std::chrono::milliseconds::zero()) = 0;
    // What the caller puts on its stream after this finds the result. A stream of a GPU waits and
    // the caller does not; a stream of a CPU is its caller, which waits here. False: it failed.
    virtual bool WaitNonBlocking() = 0;

    virtual bool IsCompleted() const = 0; // over, well or not
    virtual bool IsSuccess() const = 0;   // over and well
    // Waits until it is over and throws what it failed with.
    virtual void Synchronize() const = 0;
    virtual std::exception_ptr exception() const = 0; // null while it runs and when it went well

    // Events of the device, null on a CPU: its input was ready, its output is.
    virtual void *ready_event() const = 0;
    virtual void *done_event() const = 0;
};

// Work of a thread of this process.
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

    // Once, by whom runs it; null: it went well.
    void Finish(std::exception_ptr error);

private:
    mutable std::mutex mutex_;
    mutable std::condition_variable over_;
    bool is_over_ = false;
    std::exception_ptr error_;
};

} // namespace llaisys::parallel
