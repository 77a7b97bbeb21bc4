// A fork-join thread pool: the caller and its workers execute the chunks of one parallel region.
//
// Workers spin briefly after a region and then sleep. A region never waits for a worker that has
// not started on it, so a descheduled or sleeping worker does not delay it. Every thread executes a
// run of adjacent chunks, which keeps its reads sequential, and then steals from the end of the
// other threads' runs. The body must give the same result whichever thread runs a chunk.
#pragma once

#include "device/cpu/read_ahead.hpp"

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

namespace llaisys::device {

class ThreadPool {
public:
    // n_threads counts the caller; 0 means usable_cores(). The process-wide limit may
    // reduce it.
    explicit ThreadPool(int n_threads);
    ~ThreadPool();
    ThreadPool(const ThreadPool &) = delete;
    ThreadPool &operator=(const ThreadPool &) = delete;

    // Number of threads of a region, the caller included; thread indices are below it.
    int size() const { return int(workers_.size()) + 1; }

    // Runs body(chunk, thread) for every chunk in [0, n_chunks); returns when all are done. The
    // body must not throw and must not start a region on this pool. One caller at a time.
    template <typename Body> void run(int64_t n_chunks, const Body &body) {
        if (n_chunks <= 0) {
            return;
        }
        if (n_chunks == 1 || workers_.empty()) {
            for (int64_t chunk = 0; chunk < n_chunks; ++chunk) {
                body(chunk, 0);
            }
            return;
        }
        run_region(
            n_chunks, Take::one,
            [](const void *context, int64_t first, int64_t, int thread) {
                (*static_cast<const Body *>(context))(first, thread);
            },
            &body);
    }

    // The same with body(first, last, thread) for ranges [first, last) of up to kTogether chunks, fewer
    // near the end of a run, where a slow thread would keep the others waiting. For chunks that are
    // cheaper together.
    static constexpr int kTogether = 4;
    template <typename Body> void run_ranges(int64_t n_chunks, const Body &body) {
        if (n_chunks <= 0) {
            return;
        }
        if (n_chunks == 1 || workers_.empty()) {
            return body(int64_t(0), n_chunks, 0);
        }
        run_region(
            n_chunks, Take::some,
            [](const void *context, int64_t first, int64_t last, int thread) {
                (*static_cast<const Body *>(context))(first, last, thread);
            },
            &body);
    }

    // Before a region: what it reads. Waiting workers prefetch what will follow it.
    void announce(const Reads &reads) {
        if (!workers_.empty()) {
            read_ahead_.announce(reads, size());
        }
    }

    // Limit over all pools created afterwards; at least 1.
    static void set_process_limit(int n_threads);

private:
    using Invoke = void (*)(const void *context, int64_t first, int64_t last, int thread);
    // How many chunks a thread takes off its own run at a time: one, or up to kTogether.
    enum class Take { one, some };

    // Remaining chunks of one thread: low 32 bits the first, high 32 bits the end. Its owner takes
    // from the front, other threads steal from the back.
    struct alignas(64) Share {
        std::atomic<uint64_t> range{0};
    };

    void run_region(int64_t n_chunks, Take take, Invoke invoke, const void *context);
    void share_out(int64_t n_chunks);
    void work(int thread);
    void take_chunks(int thread);
    // Whether a region other than seen_epoch is open, or the pool stops.
    bool is_due(uint64_t seen_epoch) const;
    // Returns when is_due() may be true.
    void wait_for_region(uint64_t seen_epoch);

    // Where a worker says which region it is inside: the epoch, 0 outside. On a line of its own, so
    // that joining and leaving a region does not contend with the other workers.
    struct alignas(64) Member {
        std::atomic<uint64_t> epoch{0};
    };

    // Odd while a region is open. A worker stores it in its Member and joins if it is still the
    // same afterwards. run_region closes the region and then reads all members. The total order of
    // these four operations lets either the worker see the region closed or run_region see the
    // member, so no thread reads the fields below once the region is closed and empty.
    alignas(64) std::atomic<uint64_t> epoch_{0};
    // The open region; written before it opens, read only by threads inside it. All shares are
    // empty when it closes.
    alignas(64) std::unique_ptr<Share[]> shares_;
    std::unique_ptr<Member[]> members_;
    Take take_ = Take::one;
    Invoke invoke_ = nullptr;
    const void *context_ = nullptr;

    ReadAhead read_ahead_;

    // On separate cache lines: waiting workers poll these.
    alignas(64) std::atomic<int> sleepers_{0};
    std::atomic<bool> stopping_{false};
    std::mutex mutex_;
    std::condition_variable wake_;
    std::vector<std::thread> workers_;
};

} // namespace llaisys::device
