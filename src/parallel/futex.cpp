#include "parallel/futex.hpp"

#if defined(__linux__)
#include <climits>
#include <ctime>
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#else
#include <thread>
#endif

namespace llaisys::parallel {

static_assert(sizeof(std::atomic<uint32_t>) == sizeof(uint32_t));

#if defined(__linux__)

void sleep_on(const std::atomic<uint32_t> &word, uint32_t seen, std::chrono::milliseconds limit) {
    timespec time{};
    time.tv_sec = time_t(limit.count() / 1000);
    time.tv_nsec = long(limit.count() % 1000) * 1000000;
    syscall(SYS_futex, &word, FUTEX_WAIT, seen, &time, nullptr, 0);
}

void wake_all(const std::atomic<uint32_t> &word) {
    syscall(SYS_futex, &word, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

#else

void sleep_on(const std::atomic<uint32_t> &word, uint32_t seen, std::chrono::milliseconds) {
    if (word.load() == seen) {
        std::this_thread::sleep_for(std::chrono::microseconds(50));
    }
}

void wake_all(const std::atomic<uint32_t> &) {}

#endif

} // namespace llaisys::parallel
