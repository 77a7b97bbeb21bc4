// Transport between machines: a TCP connection between each two ranks. Every rank sends its buffer
// to all others and stores a copy of theirs.
//
// A closed connection is a lost rank; a lost machine is detected within seconds
// (socket_connect.hpp). All machines have the same byte order.
#pragma once

#include "parallel/socket_connect.hpp"
#include "parallel/transport.hpp"

#include <deque>
#include <memory>
#include <mutex>
#include <vector>

namespace llaisys::parallel {

class SocketTransport final : public Transport {
public:
    // Returns when all ranks are connected.
    explicit SocketTransport(const RendezvousOptions &ranks);
    ~SocketTransport() override;

    std::byte *send_buffer() const override;
    void exchange(const Fingerprint &fingerprint, int64_t bytes) override;
    const std::byte *buffer_of(int rank) const override;
    // Does not wait for the receiver while the message fits into the socket buffer.
    void send_message(int to, const Fingerprint &fingerprint, const void *data,
                      int64_t bytes) override;
    void recv_message(int from, const Fingerprint &fingerprint, void *data, int64_t bytes) override;
    void check_peers() override;
    void abort(const std::string &reason) noexcept override;

private:
    struct Frame;
    struct Peer;
    using Clock = std::chrono::steady_clock;

    void queue(Peer *peer, const Frame &frame, const std::byte *body);
    void write_some(Peer *peer);
    void read_some(int index);
    void start_body(Peer *peer, int index);
    void finish_body(Peer *peer);
    // Reads and writes while waits_for(rank, peer) holds for any peer; throws when such a peer is
    // lost.
    template <typename Waits> void poll_while(const Waits &waits_for);
    [[noreturn]] void abort_and_throw(const std::string &reason);
    void send_abort(const std::string &reason) noexcept;

    std::vector<std::unique_ptr<Peer>> peers_; // [world]; null: this rank
    std::vector<std::byte> buffers_;           // two send buffers of this rank
    std::chrono::milliseconds timeout_;
    uint32_t round_ = 0; // the last completed one; wraps

    std::mutex io_mutex_; // held by a call; only abort() may run beside it
    AbortReason aborted_;
};

} // namespace llaisys::parallel
