#include "device/cpu/thread_pool.hpp"

#include "base/check.hpp"
#include "base/cpu_relax.hpp"
#include "device/cpu/usable_cores.hpp"

#include <algorithm>
#include <chrono>
#include <limits>

namespace llaisys::device {

namespace {

constexpr auto kSpinTime = std::chrono::microseconds(1000);
constexpr int kPausesBeforeYield = 4096; // about 100 microseconds

std::atomic<int> process_limit{0}; // 0: default
std::atomic<int> process_workers{0};

// Claims up to `wanted` workers within the process-wide limit.
int claim_workers(int wanted) {
    const int set = process_limit.load();
    const int cores = std::max(1, int(std::thread::hardware_concurrency()));
    const int limit = set > 0 ? set - 1 : cores * 4;
    int in_use = process_workers.load();
    int granted;
    do {
        granted = std::max(0, std::min(wanted, limit - in_use));
    } while (!process_workers.compare_exchange_weak(in_use, in_use + granted));
    return granted;
}

bool is_open(uint64_t epoch) { return (epoch & 1u) != 0; }

uint64_t range_of(uint64_t first, uint64_t end) { return end << 32 | first; }
uint32_t first_of(uint64_t range) { return uint32_t(range); }
uint32_t end_of(uint64_t range) { return uint32_t(range >> 32); }

// Chunks [first, last).
struct Chunks {
    int64_t first;
    int64_t last;
};

enum class End { front, back };

// Takes count(rest) chunks off an end of a range; none when it is empty.
template <End end, typename Count> Chunks take(std::atomic<uint64_t> &range, const Count &count) {
    uint64_t seen = range.load(std::memory_order_relaxed);
    while (first_of(seen) < end_of(seen)) {
        const uint32_t n = count(end_of(seen) - first_of(seen));
        const uint64_t rest = end == End::front ? range_of(first_of(seen) + n, end_of(seen))
                                                : range_of(first_of(seen), end_of(seen) - n);
        if (range.compare_exchange_weak(seen, rest, std::memory_order_relaxed)) {
            const int64_t first = end == End::front ? first_of(seen) : end_of(seen) - n;
            return {first, first + n};
        }
    }
    return {0, 0};
}

} // namespace

void ThreadPool::set_process_limit(int n_threads) {
    require(n_threads >= 1, "thread limit must be at least 1, got ", n_threads);
    process_limit.store(n_threads);
}

ThreadPool::ThreadPool(int n_threads) {
    require(n_threads >= 0 && n_threads <= 4096, "n_threads must be in [0, 4096], got ", n_threads);
    const int wanted = (n_threads == 0 ? usable_cores() : n_threads) - 1;
    const int granted = claim_workers(wanted);
    try {
        shares_ = std::make_unique<Share[]>(size_t(granted) + 1);
        members_ = std::make_unique<Member[]>(size_t(granted) + 1);
        workers_.reserve(size_t(granted));
        for (int i = 0; i < granted; ++i) {
            workers_.emplace_back([this, i] { work(i + 1); });
        }
    } catch (const std::exception &error) { // fewer threads than requested is not a failure
        process_workers.fetch_sub(granted - int(workers_.size()));
        if (workers_.empty() && granted > 0) {
            fail(LLAISYS_ERROR_MEMORY, "no thread could be started: ", error.what());
        }
    }
}

ThreadPool::~ThreadPool() {
    {
        std::lock_guard<std::mutex> lock(mutex_);
        stopping_.store(true);
    }
    wake_.notify_all();
    for (std::thread &worker : workers_) {
        worker.join();
    }
    process_workers.fetch_sub(int(workers_.size()));
}

void ThreadPool::run_region(int64_t n_chunks, Take take, Invoke invoke, const void *context) {
    ensure(n_chunks <= std::numeric_limits<uint32_t>::max(), "too many chunks: ", n_chunks);
    take_ = take;
    invoke_ = invoke;
    context_ = context;
    share_out(n_chunks);
    epoch_.fetch_add(1); // opens the region and publishes the fields above
    if (sleepers_.load() > 0) {
        std::lock_guard<std::mutex> lock(mutex_);
        wake_.notify_all();
    }
    take_chunks(0);
    epoch_.fetch_add(1); // closes the region: no thread can join
    int pauses = 0;
    for (int i = 1; i < size(); ++i) {
        while (members_[size_t(i)].epoch.load() != 0) {
            if (pauses++ < kPausesBeforeYield) {
                cpu_relax();
            } else { // a worker inside may be waiting for this core
                pauses = kPausesBeforeYield;
                std::this_thread::yield();
            }
        }
    }
}

void ThreadPool::share_out(int64_t n_chunks) {
    const int64_t n = std::min<int64_t>(n_chunks, size());
    for (int64_t i = 0; i < n; ++i) {
        shares_[size_t(i)].range.store(
            range_of(uint64_t(n_chunks * i / n), uint64_t(n_chunks * (i + 1) / n)),
            std::memory_order_relaxed);
    }
}

void ThreadPool::take_chunks(int thread) {
    const auto one = [](uint32_t) { return 1u; };
    const auto some = [most = take_ == Take::some ? uint32_t(kTogether) : 1u](uint32_t rest) {
        return std::clamp(rest / 4, 1u, most);
    };
    const auto invoke = [&](Chunks chunks) {
        if (chunks.first < chunks.last) {
            invoke_(context_, chunks.first, chunks.last, thread);
        }
        return chunks.first < chunks.last;
    };
    while (invoke(take<End::front>(shares_[size_t(thread)].range, some))) {
    }
    const int n = size();
    for (int i = 1; i < n; ++i) {
        while (invoke(take<End::back>(shares_[size_t((thread + i) % n)].range, one))) {
        }
    }
}

void ThreadPool::work(int thread) {
    std::atomic<uint64_t> &member = members_[size_t(thread)].epoch;
    uint64_t seen_epoch = 0;
    uint64_t read = 0; // see ReadAhead::prefetch
    while (!stopping_.load(std::memory_order_relaxed)) {
        const uint64_t epoch = epoch_.load();
        if (!is_open(epoch) || epoch == seen_epoch) {
            read_ahead_.prefetch(thread, &read, [&] { return is_due(seen_epoch); });
            wait_for_region(seen_epoch);
            continue;
        }
        member.store(epoch);
        if (epoch_.load() == epoch) {
            seen_epoch = epoch;
            take_chunks(thread);
        }
        member.store(0, std::memory_order_release);
    }
}

bool ThreadPool::is_due(uint64_t seen_epoch) const {
    const uint64_t epoch = epoch_.load();
    return stopping_.load(std::memory_order_relaxed) || (is_open(epoch) && epoch != seen_epoch);
}

void ThreadPool::wait_for_region(uint64_t seen_epoch) {
    const auto deadline = std::chrono::steady_clock::now() + kSpinTime;
    do {
        for (int i = 0; i < 64; ++i) {
            if (is_due(seen_epoch)) {
                return;
            }
            cpu_relax();
        }
    } while (std::chrono::steady_clock::now() < deadline);

    std::unique_lock<std::mutex> lock(mutex_);
    // Increment sleepers_ before the last check of the epoch; run_region does both in reverse
    // order.
    sleepers_.fetch_add(1);
    const uint64_t slept_epoch = epoch_.load();
    // Also wake for a region that has ended: more usually follow.
    wake_.wait(lock, [&] { return is_due(seen_epoch) || epoch_.load() != slept_epoch; });
    sleepers_.fetch_sub(1);
}

} // namespace llaisys::device
