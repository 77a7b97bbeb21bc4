#include "parallel/work.hpp"

namespace llaisys::parallel {

bool HostWork::WaitBlocking(std::chrono::milliseconds timeout) {
    std::unique_lock<std::mutex> lock(mutex_);
    const auto is_done = [this] { return is_done_; };
    if (timeout == std::chrono::milliseconds::zero()) {
        done_.wait(lock, is_done);
    } else if (!done_.wait_for(lock, timeout, is_done)) {
        return false;
    }
    return error_ == nullptr;
}

bool HostWork::WaitNonBlocking() { return WaitBlocking(std::chrono::milliseconds::zero()); }

bool HostWork::IsCompleted() const {
    std::lock_guard<std::mutex> lock(mutex_);
    return is_done_;
}

bool HostWork::IsSuccess() const {
    std::lock_guard<std::mutex> lock(mutex_);
    return is_done_ && error_ == nullptr;
}

void HostWork::Synchronize() const {
    std::unique_lock<std::mutex> lock(mutex_);
    done_.wait(lock, [this] { return is_done_; });
    if (error_ != nullptr) {
        std::rethrow_exception(error_);
    }
}

std::exception_ptr HostWork::exception() const {
    std::lock_guard<std::mutex> lock(mutex_);
    return error_;
}

void HostWork::Finish(std::exception_ptr error) {
    {
        std::lock_guard<std::mutex> lock(mutex_);
        is_done_ = true;
        error_ = std::move(error);
    }
    done_.notify_all();
}

} // namespace llaisys::parallel
