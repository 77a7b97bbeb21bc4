// An exchange between machines: a TCP connection between each two ranks. Every rank sends its part
// to all others and keeps a copy of theirs.
//
// A connection that ends is a rank that is gone; one whose machine is gone is noticed within seconds
// (socket_connect.hpp). All machines have the same byte order.
#pragma once

#include "parallel/exchange.hpp"
#include "parallel/socket_connect.hpp"

#include <atomic>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

namespace llaisys::parallel {

class SocketExchange final : public Exchange {
public:
    // Returns when all ranks are connected.
    explicit SocketExchange(const RankSockets &ranks);
    ~SocketExchange() override;

    std::byte *mine() const override;
    void meet(const CallTag &tag, int64_t bytes) override;
    const std::byte *of(int rank) const override;
    // Does not wait for the receiver as long as the system has room for what was sent.
    void put_mail(int to, const CallTag &tag, const void *data, int64_t bytes) override;
    void take_mail(int from, const CallTag &tag, void *data, int64_t bytes) override;
    void check_peers() override;
    void abort(const std::string &reason) noexcept override;

private:
    struct Frame;
    struct Peer;
    using Clock = std::chrono::steady_clock;

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
    std::chrono::milliseconds timeout_;
    uint32_t round_ = 0; // the last one that ended; wraps

    std::mutex io_mutex_; // held by a call: all but `abort` come from one thread at a time
    mutable std::mutex reason_mutex_;
    std::atomic<bool> is_broken_{false};
    std::string reason_;
};

} // namespace llaisys::parallel
