#include "parallel/socket_connect.hpp"

#include "base/check.hpp"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <fcntl.h>
#include <memory>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>
#include <utility>

namespace llaisys::parallel {

namespace {

using Clock = std::chrono::steady_clock;

constexpr uint32_t kMagic = 0x4c4c5450; // of a handshake
constexpr auto kHandshakeTimeout = std::chrono::seconds(2);
constexpr auto kDefaultConnectTimeout = std::chrono::seconds(60); // without a timeout option
constexpr int kPeerTimeoutMs = 5000; // without an answer of the other machine

// First message of both sides of a connection.
struct Handshake {
    uint32_t magic = kMagic;
    int32_t world = 0;
    int32_t rank = 0;
    uint32_t reserved = 0;
    char token[RendezvousOptions::kMaxToken] = {};
};

// Constant-time comparison.
bool constant_time_equal(const char *a, const char *b, size_t n) {
    unsigned difference = 0;
    for (size_t i = 0; i < n; ++i) {
        difference |= unsigned(a[i] ^ b[i]);
    }
    return difference == 0;
}

void set_option(int fd, int level, int name, int value) {
    setsockopt(fd, level, name, &value, sizeof value);
}

void prepare_socket(int fd) {
    fcntl(fd, F_SETFD, FD_CLOEXEC);
    fcntl(fd, F_SETFL, fcntl(fd, F_GETFL) | O_NONBLOCK);
    set_option(fd, IPPROTO_TCP, TCP_NODELAY, 1);
    set_option(fd, SOL_SOCKET, SO_KEEPALIVE, 1);
    set_option(fd, IPPROTO_TCP, TCP_KEEPIDLE, 1);
    set_option(fd, IPPROTO_TCP, TCP_KEEPINTVL, 1);
    set_option(fd, IPPROTO_TCP, TCP_KEEPCNT, kPeerTimeoutMs / 1000 - 1);
    set_option(fd, IPPROTO_TCP, TCP_USER_TIMEOUT, kPeerTimeoutMs);
}

bool wait_for(int fd, short events, Clock::time_point deadline) {
    for (;;) {
        const auto left =
            std::chrono::duration_cast<std::chrono::milliseconds>(deadline - Clock::now());
        if (left.count() <= 0) {
            return false;
        }
        pollfd entry{fd, events, 0};
        const int found = poll(&entry, 1, int(std::min<int64_t>(left.count() + 1, 1000)));
        if (found > 0) {
            return true;
        }
        if (found < 0 && errno != EINTR) {
            return false;
        }
    }
}

// Sends or receives all bytes of a value.
template <typename T> bool transfer(int fd, T *value, bool sends, Clock::time_point deadline) {
    char *bytes = reinterpret_cast<char *>(value);
    for (size_t done = 0; done < sizeof *value;) {
        if (!wait_for(fd, sends ? POLLOUT : POLLIN, deadline)) {
            return false;
        }
        const ssize_t n = sends ? send(fd, bytes + done, sizeof *value - done, MSG_NOSIGNAL)
                                : recv(fd, bytes + done, sizeof *value - done, 0);
        if (n > 0) {
            done += size_t(n);
        } else if (n == 0 || (errno != EAGAIN && errno != EINTR)) {
            return false;
        }
    }
    return true;
}

// A connected socket, or none with errno set.
Socket try_connect(const addrinfo *address, Clock::time_point deadline) {
    Socket made(socket(address->ai_family, address->ai_socktype | SOCK_CLOEXEC, 0));
    if (!made.is_open()) {
        return made;
    }
    prepare_socket(made.fd());
    int error = 0;
    if (connect(made.fd(), address->ai_addr, address->ai_addrlen) != 0) {
        error = errno;
        if (error == EINPROGRESS) {
            socklen_t size = sizeof error;
            error = ETIMEDOUT;
            if (wait_for(made.fd(), POLLOUT, deadline)) {
                getsockopt(made.fd(), SOL_SOCKET, SO_ERROR, &error, &size);
            }
        }
    }
    if (error != 0) {
        made = Socket();
        errno = error;
    }
    return made;
}

Handshake handshake_of(const RendezvousOptions &ranks) {
    Handshake own;
    own.world = int32_t(ranks.addresses.size());
    own.rank = ranks.rank;
    std::memcpy(own.token, ranks.token.data(), ranks.token.size());
    return own;
}

// The peer's rank; -1: not a member of this group.
int rank_of(const Handshake &theirs, const Handshake &own) {
    const bool is_ours = constant_time_equal(theirs.token, own.token, sizeof own.token) &&
                         theirs.magic == own.magic && theirs.world == own.world &&
                         theirs.rank >= 0 && theirs.rank < own.world;
    return is_ours ? theirs.rank : -1;
}

Socket connect_to(int peer, const std::string &address, Handshake own, Clock::time_point deadline) {
    const size_t colon = address.rfind(':');
    require(colon != std::string::npos && colon > 0, "'", address, "' is not HOST:PORT");
    std::string host = address.substr(0, colon);
    if (host.size() > 2 && host.front() == '[' && host.back() == ']') {
        host = host.substr(1, host.size() - 2);
    }
    addrinfo hints{};
    hints.ai_socktype = SOCK_STREAM;
    addrinfo *found = nullptr;
    const int code = getaddrinfo(host.c_str(), address.c_str() + colon + 1, &hints, &found);
    if (code != 0) {
        fail(LLAISYS_ERROR_IO, "rank ", peer, " at ", address, ": ", gai_strerror(code));
    }
    const std::shared_ptr<addrinfo> addresses(found, freeaddrinfo);
    Socket made;
    for (addrinfo *at = found; at != nullptr && !made.is_open(); at = at->ai_next) {
        made = try_connect(at, deadline);
    }
    if (!made.is_open()) {
        fail(LLAISYS_ERROR_IO, "rank ", peer, " at ", address, ": ", std::strerror(errno));
    }
    // The connecting side sends first: a listener reveals its token only after it received it.
    Handshake theirs;
    if (!transfer(made.fd(), &own, true, deadline) ||
        !transfer(made.fd(), &theirs, false, deadline) || rank_of(theirs, own) != peer) {
        fail(LLAISYS_ERROR_IO, "rank ", peer, " at ", address, " sent an invalid handshake");
    }
    return made;
}

// Accepts connections of all higher ranks into `sockets`. A connection without a valid handshake is
// closed after kHandshakeTimeout at the latest.
void accept_higher_ranks(int listener, Handshake own, Clock::time_point deadline,
                         std::vector<Socket> *sockets) {
    for (int missing = own.world - 1 - own.rank; missing > 0;) {
        if (!wait_for(listener, POLLIN, deadline)) {
            fail(LLAISYS_ERROR_INTERNAL, missing, " of ", own.world,
                 " ranks did not connect in time");
        }
        Socket made(accept(listener, nullptr, nullptr));
        if (!made.is_open()) {
            continue;
        }
        prepare_socket(made.fd());
        const Clock::time_point soon = std::min(deadline, Clock::now() + kHandshakeTimeout);
        Handshake theirs;
        const int peer = transfer(made.fd(), &theirs, false, soon) ? rank_of(theirs, own) : -1;
        if (peer > own.rank && !(*sockets)[size_t(peer)].is_open() &&
            transfer(made.fd(), &own, true, soon)) {
            (*sockets)[size_t(peer)] = std::move(made);
            --missing;
        }
    }
}

} // namespace

Socket::~Socket() {
    if (fd_ >= 0) {
        close(fd_);
    }
}

Socket &Socket::operator=(Socket &&other) noexcept {
    std::swap(fd_, other.fd_);
    return *this;
}

std::vector<Socket> connect_ranks(const RendezvousOptions &ranks) {
    const Socket listener(ranks.listener);
    require(!ranks.token.empty() && ranks.token.size() <= RendezvousOptions::kMaxToken,
            "the token must have 1 to ", RendezvousOptions::kMaxToken, " characters, got ",
            ranks.token.size());
    fcntl(listener.fd(), F_SETFD, FD_CLOEXEC);
    fcntl(listener.fd(), F_SETFL, fcntl(listener.fd(), F_GETFL) | O_NONBLOCK);
    const std::chrono::milliseconds limit =
        ranks.timeout.count() > 0 ? ranks.timeout : kDefaultConnectTimeout;
    const Clock::time_point deadline = Clock::now() + limit;
    const Handshake own = handshake_of(ranks);
    std::vector<Socket> sockets(ranks.addresses.size());
    for (int peer = 0; peer < ranks.rank; ++peer) {
        sockets[size_t(peer)] = connect_to(peer, ranks.addresses[size_t(peer)], own, deadline);
    }
    accept_higher_ranks(listener.fd(), own, deadline, &sockets);
    return sockets;
}

} // namespace llaisys::parallel
