// How the ranks of a group on several machines come to have a TCP connection between each two: a rank
// connects to those before it and is connected to by those behind it. Both sides show the token of
// the group first; who connects from anywhere else is turned away.
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

// Where each rank is found, and what the caller brings along.
struct RankSockets {
    int rank = 0;
    int listener = -1;                  // a listening socket; it is taken over
    std::string token;                  // 1 to kMaxToken characters
    std::vector<std::string> addresses; // "HOST:PORT" of each rank, [world]
    std::chrono::milliseconds timeout{
        0}; // of the calls, and of connecting; 0: connecting has a minute

    static constexpr size_t kMaxToken = 64;
};

// A connection to each rank, [world], but to the caller itself, whose place is empty. Sockets do not
// block, and their end is noticed within seconds when the other machine is gone. The listener is
// closed, also when this throws: a wrong token, a rank that is not there or does not come in time.
std::vector<Socket> connect_ranks(const RankSockets &ranks);

} // namespace llaisys::parallel
