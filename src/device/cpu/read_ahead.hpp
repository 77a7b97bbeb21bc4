// What the parallel regions of a pool read, one after the other, as far as it was announced: threads
// that wait for the next region prefetch what it is expected to read. Memory would be idle while one
// thread computes alone, and a region starts slowly when its first bytes come from memory.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <unordered_map>

namespace llaisys::device {

// Bytes that a region reads in order, each thread about an equal part of them.
struct Reads {
    static constexpr int kRanges = 3;
    const void *begin[kRanges] = {};
    int64_t bytes[kRanges] = {};
};

class ReadAhead {
public:
    // By the caller of regions, before one: what its n_threads threads read. What was announced after the
    // same reads the last time is expected next; its memory may be gone.
    void announce(const Reads &reads, int n_threads);

    // By a waiting thread: prefetches the beginning of its part of what is expected, until is_due().
    // `read` is this thread's number of the last announcement after which it did so.
    template <typename IsDue> void prefetch(int thread, uint64_t *read, const IsDue &is_due) const;

private:
    static constexpr int64_t kMostBytes = 256 << 10; // of a thread: leaves room in L2
    static constexpr int64_t kLine = 64;
    static constexpr int64_t kLinesAtOnce = 4;

    std::unordered_map<const void *, Reads> followers_; // by the first address of the reads before
    const void *announced_ = nullptr;                   // the first address of the latest reads
    // What is expected. Relaxed: parts of two announcements only prefetch other bytes.
    struct alignas(64) Expected {
        std::atomic<uint64_t> number{0}; // of announcements
        std::atomic<int64_t> part{0};    // bytes of a thread
        std::atomic<const void *> begin[Reads::kRanges]{};
        std::atomic<int64_t> bytes[Reads::kRanges]{};
    };
    Expected expected_;
};

inline void ReadAhead::announce(const Reads &reads, int n_threads) {
    const void *const first = reads.begin[0];
    if (announced_ != nullptr) {
        followers_[announced_] = reads;
    }
    announced_ = first;
    const auto follower = followers_.find(first);
    const Reads next = follower != followers_.end() ? follower->second : Reads{};
    int64_t all = 0;
    for (int i = 0; i < Reads::kRanges; ++i) {
        expected_.begin[i].store(next.begin[i], std::memory_order_relaxed);
        expected_.bytes[i].store(next.bytes[i], std::memory_order_relaxed);
        all += next.bytes[i];
    }
    expected_.part.store(all / n_threads, std::memory_order_relaxed);
    expected_.number.fetch_add(1, std::memory_order_relaxed);
}

template <typename IsDue>
void ReadAhead::prefetch(int thread, uint64_t *read, const IsDue &is_due) const {
    const uint64_t number = expected_.number.load(std::memory_order_relaxed);
    if (*read == number) {
        return;
    }
    const int64_t part = expected_.part.load(std::memory_order_relaxed);
    int64_t skipped = part * thread;
    int64_t left = std::min(part, kMostBytes);
    for (int i = 0; i < Reads::kRanges && left > 0; ++i) {
        const int64_t bytes = expected_.bytes[i].load(std::memory_order_relaxed);
        const int64_t end = std::min(bytes, skipped + left);
        const auto begin = uintptr_t(expected_.begin[i].load(std::memory_order_relaxed));
        for (int64_t at = skipped; at < end; at += kLinesAtOnce * kLine) {
            if (is_due()) {
                return;
            }
            for (int64_t line = 0; line < kLinesAtOnce; ++line) {
                const uintptr_t address = begin + uintptr_t(at + line * kLine);
                __builtin_prefetch(reinterpret_cast<const void *>(address), 0, 2);
            }
        }
        left -= std::max<int64_t>(end - skipped, 0);
        skipped = std::max<int64_t>(skipped - bytes, 0);
    }
    *read = number;
}

} // namespace llaisys::device
