// Transport over shared memory, between threads of a process or processes of a machine. The process
// group provides the memory.
#pragma once

#include "parallel/transport.hpp"

#include <atomic>
#include <chrono>
#include <functional>
#include <memory>

namespace llaisys::parallel {

class SharedMemoryTransport final : public Transport {
public:
    struct Options {
        int world = 1;
        int rank = 0;
        std::chrono::milliseconds timeout{0}; // 0: none
        // Whether a rank that has joined still runs; polled while waiting for it.
        std::function<bool(int rank)> is_alive;
    };

    static size_t bytes_for(int world);

    // `memory`: bytes_for(world) bytes, page-aligned and zeroed before the first rank joins; shared
    // ownership. Throws when the group has another size or the rank has already joined.
    SharedMemoryTransport(std::shared_ptr<void> memory, const Options &options);
    ~SharedMemoryTransport() override;

    std::byte *send_buffer() const override { return buffer(rank(), round_ + 1); }
    void exchange(const Fingerprint &fingerprint, int64_t bytes) override;
    const std::byte *buffer_of(int rank) const override { return buffer(rank, round_); }
    // A second message to the same rank waits until the first is received.
    void send_message(int to, const Fingerprint &fingerprint, const void *data,
                      int64_t bytes) override;
    void recv_message(int from, const Fingerprint &fingerprint, void *data, int64_t bytes) override;
    void check_peers() override;
    void abort(const std::string &reason) noexcept override;

    // Returns when all ranks have joined; throws when a rank dies or on timeout.
    void wait_for_all() const;

private:
    struct Header;
    struct RankState;
    struct Mailbox;

    Header &header() const;
    RankState &rank_state(int rank) const;
    Mailbox &mailbox(int from, int to) const;
    std::byte *buffer(int rank, uint32_t round) const;
    void join();
    template <typename Reached>
    void wait(std::atomic<uint32_t> &word, std::atomic<uint32_t> &sleepers, int peer,
              const Reached &reached) const;
    void throw_if_aborted() const;
    void check_alive(int peer) const;
    void check_time(std::chrono::steady_clock::time_point start, const std::string &ranks) const;
    [[noreturn]] void abort_and_throw(const std::string &reason) const;

    std::shared_ptr<void> memory_;
    Options options_;
    std::chrono::microseconds spin_; // spin time before a futex wait
    uint32_t round_ = 0;             // the last completed one; wraps
};

} // namespace llaisys::parallel
