// An exchange between machines: a TCP connection between each two ranks. Every rank sends its part
// to all others and keeps a copy of theirs.
//
// A connection that ends is a rank that is gone; one whose machine is gone is noticed by keep-alive
// probes within seconds. All machines have the same byte order.
#pragma once

#include "parallel/exchange.hpp"

#include <atomic>
#include <chrono>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

namespace llaisys::parallel {

class SocketExchange final : public Exchange {
public:
    struct Options {
        int rank = 0;
        int listener = -1;                    // a listening socket; it is taken over
        std::string token;                    // connections without it are turned away
        std::vector<std::string> addresses;   // "HOST:PORT" of each rank, [world]
        std::chrono::milliseconds timeout{0}; // 0: as long as the others live
    };
    static constexpr size_t kMaxToken = 64;

    // Returns when all ranks are connected.
    explicit SocketExchange(const Options &options);
    ~SocketExchange() override;

    std::byte *mine() const override;
    void meet(const CallTag &tag, int64_t bytes) override;
    const std::byte *of(int rank) const override;
    // Does not wait for the receiver as long as the system has room for what was sent.
    void put_mail(int to, const CallTag &tag, const void *data, int64_t bytes) override;
    void take_mail(int from, const CallTag &tag, void *data, int64_t bytes) override;
    void abort(const std::string &reason) noexcept override;

private:
    struct Greeting;
    struct Frame;
    struct Peer;
    using Clock = std::chrono::steady_clock;

    void connect_all(const Options &options);
    void connect_to(int peer, const std::string &address, Clock::time_point deadline);
    void accept_from_others(int listener, Clock::time_point deadline);
    Greeting greeting() const;
    int rank_of(const Greeting &theirs) const;
    void adopt(int peer, int fd);

    void queue(Peer *peer, const Frame &frame, const std::byte *body);
    void write_some(Peer *peer);
    void read_some(int index);
    void begin_body(Peer *peer, int index);
    void take_body(Peer *peer);
    // Reads and writes as long as waits_for(rank, peer) of any; throws when that one cannot come.
    template <typename Waits> void run_while(const Waits &waits_for);
    void check_usable() const;
    [[noreturn]] void give_up(const std::string &reason);
    bool break_with(const std::string &reason) noexcept; // false: it was broken before
    void tell_all(const std::string &reason) noexcept;

    std::vector<std::unique_ptr<Peer>> peers_; // [world]; null: this rank
    std::vector<std::byte> parts_;             // of this rank, two
    std::string token_;
    std::chrono::milliseconds timeout_;
    uint32_t round_ = 0; // the last one that ended; wraps

    std::mutex io_mutex_; // held by a call: all but `abort` come from one thread at a time
    mutable std::mutex reason_mutex_;
    std::atomic<bool> is_broken_{false};
    std::string reason_;
};

} // namespace llaisys::parallel
