// Handle of a started collective.
#pragma once

#include <chrono>
#include <condition_variable>
#include <exception>
#include <memory>
#include <mutex>
#include <utility>

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
    bool IsSuccess() const { return IsCompleted() && exception() == nullptr; }
    // Waits for completion and rethrows a failure.
    void Synchronize() {
        WaitBlocking();
        if (const std::exception_ptr error = exception()) {
            std::rethrow_exception(error);
        }
    }
    virtual std::exception_ptr exception() const = 0; // null while running and on success

    // Device events, null on a CPU: the input is ready; the output is ready.
    virtual void *ready_event() const = 0;
    virtual void *done_event() const = 0;
};

// Work that runs on a thread of this process.
class HostWork final : public Work {
public:
    bool WaitBlocking(std::chrono::milliseconds timeout) override {
        std::unique_lock<std::mutex> lock(mutex_);
        const auto is_done = [this] { return is_done_; };
        if (timeout == std::chrono::milliseconds::zero()) {
            done_.wait(lock, is_done);
        } else if (!done_.wait_for(lock, timeout, is_done)) {
            return false;
        }
        return error_ == nullptr;
    }
    bool WaitNonBlocking() override { return WaitBlocking(std::chrono::milliseconds::zero()); }
    bool IsCompleted() const override {
        std::lock_guard<std::mutex> lock(mutex_);
        return is_done_;
    }
    std::exception_ptr exception() const override {
        std::lock_guard<std::mutex> lock(mutex_);
        return error_;
    }
    void *ready_event() const override { return nullptr; }
    void *done_event() const override { return nullptr; }

    // Called once, by the thread that runs the work; null: success.
    void Finish(std::exception_ptr error) {
        {
            std::lock_guard<std::mutex> lock(mutex_);
            is_done_ = true;
            error_ = std::move(error);
        }
        done_.notify_all();
    }

private:
    mutable std::mutex mutex_;
    mutable std::condition_variable done_;
    bool is_done_ = false;
    std::exception_ptr error_;
};

// For calls that are complete when they return.
inline std::shared_ptr<Work> completed_work() {
    auto work = std::make_shared<HostWork>();
    work->Finish(nullptr);
    return work;
}

} // namespace llaisys::parallel
