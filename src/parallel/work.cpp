#include "parallel/work.hpp"

namespace llaisys::parallel {

bool HostWork::WaitBlocking(std::chrono::milliseconds timeout) {
    std::unique_lock<std::mutex> lock(mutex_);
    const auto is_over = [this] { return is_over_; };
    if (timeout == std::chrono::milliseconds::zero()) {
        over_.wait(lock, is_over);
    } else if (!over_.wait_for(lock, timeout, is_over)) {
        return false;
    }
    return error_ == nullptr;
}

bool HostWork::WaitNonBlocking() { return WaitBlocking(std::chrono::milliseconds::zero()); }

bool HostWork::IsCompleted() const {
    std::lock_guard<std::mutex> lock(mutex_);
    return is_over_;
}

bool HostWork::IsSuccess() const {
    std::lock_guard<std::mutex> lock(mutex_);
    return is_over_ && error_ == nullptr;
}

void HostWork::Synchronize() const {
    std::unique_lock<std::mutex> lock(mutex_);
    over_.wait(lock, [this] { return is_over_; });
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
        is_over_ = true;
        error_ = std::move(error);
    }
    over_.notify_all();
}

} // namespace llaisys::parallel
