// TCP rendezvous: creates a connection between each two ranks. A rank connects to all lower ranks
// and accepts connections of all higher ranks. Both sides send the group's token first; a
// connection with another token is closed.
#pragma once

#include <chrono>
#include <string>
#include <vector>

namespace llaisys::parallel {

// Owns the descriptor of a socket; -1: none.
class Socket {
public:
    explicit Socket(int fd = -1) : fd_(fd) {}
    ~Socket();
    Socket(Socket &&other) noexcept : fd_(other.fd_) { other.fd_ = -1; }
    Socket &operator=(Socket &&other) noexcept;

    int fd() const { return fd_; }
    bool is_open() const { return fd_ >= 0; }

private:
    int fd_;
};

// Addresses of the ranks, and the caller's own rank, listener and token.
struct RendezvousOptions {
    int rank = 0;
    int listener = -1;                  // a listening socket; connect_ranks takes ownership
    std::string token;                  // 1 to kMaxToken characters
    std::vector<std::string> addresses; // "HOST:PORT" of each rank, [world]
    // Of calls and of connecting; 0: calls have none, connecting one minute.
    std::chrono::milliseconds timeout{0};

    static constexpr size_t kMaxToken = 64;
};

// A connection to each rank, [world]; the caller's own entry is empty. Sockets are non-blocking and
// detect a lost machine within seconds. Closes the listener. Throws for an invalid token and for a
// rank that cannot be reached or does not connect in time.
std::vector<Socket> connect_ranks(const RendezvousOptions &ranks);

} // namespace llaisys::parallel
