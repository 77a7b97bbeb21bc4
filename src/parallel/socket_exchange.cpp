#include "parallel/socket_exchange.hpp"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <fcntl.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

namespace llaisys::parallel {

namespace {

constexpr uint32_t kMagic = 0x4c4c5450; // of a frame, and of a greeting
constexpr int kNapMs = 20;              // between looks at the clock and at `abort`
constexpr auto kGreetingTime = std::chrono::seconds(2);
constexpr auto kJoinTime = std::chrono::seconds(60); // when there is no other limit
constexpr int kSilenceMs = 5000;                     // of a machine until it counts as gone
constexpr size_t kReasonBytes = 512;

enum Kind : uint32_t { kRound = 1, kMail = 2, kAbort = 3 };

// Comparing takes the same time wherever the difference is.
bool is_same(const char *a, const char *b, size_t n) {
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
    set_option(fd, IPPROTO_TCP, TCP_KEEPCNT, kSilenceMs / 1000 - 1);
    set_option(fd, IPPROTO_TCP, TCP_USER_TIMEOUT, kSilenceMs);
}

bool wait_for(int fd, short events, std::chrono::steady_clock::time_point deadline) {
    for (;;) {
        const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(
            deadline - std::chrono::steady_clock::now());
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

// All bytes of a value.
template <typename T>
bool transfer(int fd, T *value, bool sends, std::chrono::steady_clock::time_point deadline) {
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

// A connected socket, or -1 with errno set.
int try_connect(const addrinfo *address, std::chrono::steady_clock::time_point deadline) {
    const int fd = socket(address->ai_family, address->ai_socktype | SOCK_CLOEXEC, 0);
    if (fd < 0) {
        return -1;
    }
    prepare_socket(fd);
    int error = 0;
    if (connect(fd, address->ai_addr, address->ai_addrlen) != 0) {
        error = errno;
        if (error == EINPROGRESS) {
            socklen_t size = sizeof error;
            error = ETIMEDOUT;
            if (wait_for(fd, POLLOUT, deadline)) {
                getsockopt(fd, SOL_SOCKET, SO_ERROR, &error, &size);
            }
        }
    }
    if (error != 0) {
        close(fd);
        errno = error;
        return -1;
    }
    return fd;
}

} // namespace

struct SocketExchange::Greeting {
    uint32_t magic = kMagic;
    int32_t world = 0;
    int32_t rank = 0;
    uint32_t reserved = 0;
    char token[kMaxToken] = {};
};

struct SocketExchange::Frame {
    uint32_t magic = kMagic;
    uint32_t kind = kRound;
    int64_t bytes = 0; // of the body
    CallTag tag;
};

// A connection: what is being sent, what is being received, and what has come.
struct SocketExchange::Peer {
    ~Peer() {
        if (fd >= 0) {
            close(fd);
        }
    }

    int fd = -1;
    bool is_gone = false;

    Frame out;
    const std::byte *out_body = nullptr; // the caller's, until all is sent
    size_t out_done = 0, out_size = 0;
    bool has_lost_output = false; // of a rank that is about to be gone

    Frame in;
    size_t in_done = 0;           // of the frame, then of its body
    std::byte *in_body = nullptr; // null: the frame is not complete
    std::vector<std::byte> parts; // two
    CallTag tags[2];              // of an even and an odd round
    uint32_t rounds = 0;          // that have come; wraps
    std::deque<std::pair<CallTag, std::vector<std::byte>>> mails;
    std::vector<std::byte> mail; // that is being received
    std::string last_words;      // of a rank that gave up
};

SocketExchange::SocketExchange(const Options &options)
    : Exchange(int(options.addresses.size()), options.rank), parts_(2 * size_t(kPieceBytes)),
      token_(options.token), timeout_(options.timeout) {
    require(!token_.empty() && token_.size() <= kMaxToken, "the token must have 1 to ", kMaxToken,
            " characters, got ", token_.size());
    peers_.resize(options.addresses.size());
    connect_all(options);
}

SocketExchange::~SocketExchange() = default; // closing the connections is leaving

// ---- connecting ----------------------------------------------------------------------------------

void SocketExchange::connect_all(const Options &options) {
    struct Listener { // ours, whatever happens below
        int fd;
        ~Listener() { close(fd); }
    } listener{options.listener};
    fcntl(listener.fd, F_SETFD, FD_CLOEXEC);
    fcntl(listener.fd, F_SETFL, fcntl(listener.fd, F_GETFL) | O_NONBLOCK);
    const std::chrono::milliseconds limit = timeout_.count() > 0 ? timeout_ : kJoinTime;
    const Clock::time_point deadline = Clock::now() + limit;
    for (int peer = 0; peer < rank(); ++peer) {
        connect_to(peer, options.addresses[size_t(peer)], deadline);
    }
    accept_from_others(listener.fd, deadline);
}

void SocketExchange::connect_to(int peer, const std::string &address, Clock::time_point deadline) {
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
    int fd = -1;
    for (addrinfo *at = found; at != nullptr && fd < 0; at = at->ai_next) {
        fd = try_connect(at, deadline);
    }
    if (fd < 0) {
        fail(LLAISYS_ERROR_IO, "rank ", peer, " at ", address, ": ", std::strerror(errno));
    }
    // Who connects speaks first: a listener tells its token to those only who know it.
    Greeting own = greeting(), theirs;
    if (!transfer(fd, &own, true, deadline) || !transfer(fd, &theirs, false, deadline) ||
        rank_of(theirs) != peer) {
        close(fd);
        fail(LLAISYS_ERROR_IO, "rank ", peer, " at ", address, " did not answer as it should");
    }
    adopt(peer, fd);
}

// Who connects from anywhere else, or says the wrong thing, is turned away and not waited for long.
void SocketExchange::accept_from_others(int listener, Clock::time_point deadline) {
    const auto is_missing = [this](int peer) { return peers_[size_t(peer)] == nullptr; };
    for (int missing = world() - 1 - rank(); missing > 0;) {
        if (!wait_for(listener, POLLIN, deadline)) {
            fail(LLAISYS_ERROR_INTERNAL, missing, " of ", world(), " ranks did not come in time");
        }
        const int fd = accept(listener, nullptr, nullptr);
        if (fd < 0) {
            continue;
        }
        prepare_socket(fd);
        const Clock::time_point soon = std::min(deadline, Clock::now() + kGreetingTime);
        Greeting own = greeting(), theirs;
        const int peer = transfer(fd, &theirs, false, soon) ? rank_of(theirs) : -1;
        if (peer > rank() && is_missing(peer) && transfer(fd, &own, true, soon)) {
            adopt(peer, fd);
            --missing;
        } else {
            close(fd);
        }
    }
}

SocketExchange::Greeting SocketExchange::greeting() const {
    Greeting own;
    own.world = world();
    own.rank = rank();
    std::memcpy(own.token, token_.data(), token_.size());
    return own;
}

// -1: not one of ours.
int SocketExchange::rank_of(const Greeting &theirs) const {
    const Greeting own = greeting();
    const bool is_ours = is_same(theirs.token, own.token, kMaxToken) && theirs.magic == own.magic &&
                         theirs.world == own.world && theirs.rank >= 0 && theirs.rank < world();
    return is_ours ? theirs.rank : -1;
}

void SocketExchange::adopt(int peer, int fd) {
    auto made = std::make_unique<Peer>();
    made->fd = fd;
    made->parts.resize(2 * size_t(kPieceBytes));
    peers_[size_t(peer)] = std::move(made);
}

// ---- frames --------------------------------------------------------------------------------------

void SocketExchange::queue(Peer *peer, const Frame &frame, const std::byte *body) {
    peer->out = frame;
    peer->out_body = body;
    peer->out_done = 0;
    peer->out_size = sizeof frame + size_t(frame.bytes);
    write_some(peer);
}

void SocketExchange::write_some(Peer *peer) {
    while (peer->out_done < peer->out_size && !peer->is_gone) {
        const bool in_frame = peer->out_done < sizeof(Frame);
        const std::byte *from =
            in_frame ? reinterpret_cast<const std::byte *>(&peer->out) + peer->out_done
                     : peer->out_body + (peer->out_done - sizeof(Frame));
        const size_t n = (in_frame ? sizeof(Frame) : peer->out_size) - peer->out_done;
        const int more = in_frame && peer->out_size > sizeof(Frame) ? MSG_MORE : 0;
        const ssize_t sent = send(peer->fd, from, n, MSG_NOSIGNAL | MSG_DONTWAIT | more);
        if (sent >= 0) {
            peer->out_done += size_t(sent);
        } else if (errno == EAGAIN) {
            return;
        } else if (errno != EINTR) { // it may have said why: what it sent is still to be read
            peer->out_done = peer->out_size;
            peer->has_lost_output = true;
        }
    }
}

void SocketExchange::read_some(int index) {
    Peer &peer = *peers_[size_t(index)];
    while (!peer.is_gone) {
        const bool in_frame = peer.in_body == nullptr;
        std::byte *to = in_frame ? reinterpret_cast<std::byte *>(&peer.in) : peer.in_body;
        const size_t size = in_frame ? sizeof(Frame) : size_t(peer.in.bytes);
        const ssize_t n = recv(peer.fd, to + peer.in_done, size - peer.in_done, MSG_DONTWAIT);
        if (n > 0) {
            peer.in_done += size_t(n);
        } else if (n < 0 && errno == EAGAIN) {
            return;
        } else if (n == 0 || errno != EINTR) {
            peer.is_gone = true;
        }
        if (peer.in_done < size) {
            continue;
        }
        peer.in_done = 0;
        if (in_frame) {
            begin_body(&peer, index);
        }
        if (!in_frame || peer.in.bytes == 0) {
            take_body(&peer);
        }
    }
}

// The frame is there: where its body goes.
void SocketExchange::begin_body(Peer *peer, int index) {
    const Frame &frame = peer->in;
    const int64_t most = frame.kind == kRound ? kPieceBytes : kMailBytes;
    if (frame.magic != kMagic || frame.kind < kRound || frame.kind > kAbort || frame.bytes < 0 ||
        frame.bytes > most) {
        peer->is_gone = true;
        give_up(text("rank ", index, " sent what is no message"));
    }
    if (frame.kind == kRound) {
        peer->in_body = peer->parts.data() + ((peer->rounds + 1) & 1) * size_t(kPieceBytes);
    } else {
        peer->mail.resize(std::max<size_t>(1, size_t(frame.bytes)));
        peer->in_body = peer->mail.data();
    }
}

void SocketExchange::take_body(Peer *peer) {
    const Frame &frame = peer->in;
    peer->in_body = nullptr;
    if (frame.kind == kRound) {
        ++peer->rounds;
        peer->tags[peer->rounds & 1] = frame.tag;
    } else if (frame.kind == kMail) {
        peer->mail.resize(size_t(frame.bytes));
        peer->mails.emplace_back(frame.tag, std::move(peer->mail));
        peer->mail = {};
    } else {
        peer->last_words.assign(reinterpret_cast<const char *>(peer->mail.data()),
                                size_t(frame.bytes));
        peer->is_gone = true;
    }
}

template <typename Waits> void SocketExchange::run_while(const Waits &waits_for) {
    const Clock::time_point start = Clock::now();
    for (;;) {
        int awaited = -1;
        pollfd entries[kMaxWorld];
        int places[kMaxWorld];
        nfds_t count = 0;
        for (int i = 0; i < world(); ++i) {
            Peer *peer = peers_[size_t(i)].get();
            if (peer == nullptr) {
                continue;
            }
            const bool is_awaited = waits_for(i, *peer);
            awaited = is_awaited ? i : awaited;
            if (peer->is_gone) {
                if (is_awaited) {
                    const std::string gone = text("rank ", i, " is gone");
                    give_up(peer->last_words.empty() ? gone : peer->last_words);
                }
                continue;
            }
            const short output = peer->out_done < peer->out_size ? POLLOUT : 0;
            entries[count] = {peer->fd, short(POLLIN | output), 0};
            places[count++] = i;
        }
        if (awaited < 0) {
            return;
        }
        check_usable();
        if (timeout_.count() > 0 && Clock::now() - start > timeout_) {
            give_up(text("rank ", awaited, " did not come within ", timeout_.count(), " ms"));
        }
        if (poll(entries, count, kNapMs) <= 0) {
            continue;
        }
        for (nfds_t i = 0; i < count; ++i) {
            if ((entries[i].revents & POLLOUT) != 0) {
                write_some(peers_[size_t(places[i])].get());
            }
            if ((entries[i].revents & ~POLLOUT) != 0) {
                read_some(places[i]);
            }
        }
    }
}

// ---- calls ---------------------------------------------------------------------------------------

std::byte *SocketExchange::mine() const {
    return const_cast<std::byte *>(parts_.data()) + ((round_ + 1) & 1) * size_t(kPieceBytes);
}

const std::byte *SocketExchange::of(int index) const {
    const std::vector<std::byte> &parts = index == rank() ? parts_ : peers_[size_t(index)]->parts;
    return parts.data() + (round_ & 1) * size_t(kPieceBytes);
}

void SocketExchange::meet(const CallTag &tag, int64_t bytes) {
    const std::lock_guard<std::mutex> lock(io_mutex_);
    check_usable();
    const uint32_t round = round_ + 1;
    Frame frame;
    frame.kind = kRound;
    frame.bytes = bytes;
    frame.tag = tag;
    for (const std::unique_ptr<Peer> &peer : peers_) {
        if (peer != nullptr) {
            queue(peer.get(), frame, mine());
        }
    }
    run_while([round](int, const Peer &peer) {
        return peer.out_done < peer.out_size || int32_t(peer.rounds - round) < 0;
    });
    for (int i = 0; i < world(); ++i) {
        const Peer *peer = peers_[size_t(i)].get();
        if (peer != nullptr && !(peer->tags[round & 1] == tag)) {
            give_up(text("rank ", rank(), " called ", tag.text(), " while rank ", i, " called ",
                         peer->tags[round & 1].text()));
        }
    }
    round_ = round;
}

void SocketExchange::put_mail(int to, const CallTag &tag, const void *data, int64_t bytes) {
    const std::lock_guard<std::mutex> lock(io_mutex_);
    check_usable();
    Frame frame;
    frame.kind = kMail;
    frame.bytes = bytes;
    frame.tag = tag;
    queue(peers_[size_t(to)].get(), frame, static_cast<const std::byte *>(data));
    run_while([to](int i, const Peer &peer) {
        return i == to && (peer.out_done < peer.out_size || peer.has_lost_output);
    });
}

void SocketExchange::take_mail(int from, const CallTag &tag, void *data, int64_t bytes) {
    const std::lock_guard<std::mutex> lock(io_mutex_);
    check_usable();
    run_while([from](int i, const Peer &peer) { return i == from && peer.mails.empty(); });
    Peer &peer = *peers_[size_t(from)];
    const auto [sent, values] = std::move(peer.mails.front());
    peer.mails.pop_front();
    if (!(sent == tag) || int64_t(values.size()) != bytes) {
        give_up(text("rank ", rank(), " called ", tag.text(), " while rank ", from, " sent ",
                     sent.text()));
    }
    if (bytes > 0) {
        std::memcpy(data, values.data(), size_t(bytes));
    }
}

// ---- the end -------------------------------------------------------------------------------------

void SocketExchange::check_usable() const {
    if (is_broken_.load()) {
        const std::lock_guard<std::mutex> lock(reason_mutex_);
        fail(LLAISYS_ERROR_INTERNAL, reason_);
    }
}

void SocketExchange::give_up(const std::string &reason) {
    if (break_with(reason)) {
        tell_all(reason);
    }
    fail(LLAISYS_ERROR_INTERNAL, reason);
}

void SocketExchange::abort(const std::string &reason) noexcept {
    if (!break_with(reason)) {
        return;
    }
    // Another thread may be in the middle of a message: then the end of the connections must do.
    const std::unique_lock<std::mutex> lock(io_mutex_, std::try_to_lock);
    if (lock.owns_lock()) {
        tell_all(reason);
        return;
    }
    for (const std::unique_ptr<Peer> &peer : peers_) {
        if (peer != nullptr) {
            shutdown(peer->fd, SHUT_RDWR);
        }
    }
}

bool SocketExchange::break_with(const std::string &reason) noexcept {
    const std::lock_guard<std::mutex> lock(reason_mutex_);
    if (is_broken_.load()) {
        return false;
    }
    reason_ = reason.substr(0, kReasonBytes);
    is_broken_.store(true);
    return true;
}

// With io_mutex_ held. As far as the connections take it at once.
void SocketExchange::tell_all(const std::string &reason) noexcept {
    Frame frame;
    frame.kind = kAbort;
    frame.bytes = int64_t(std::min(reason.size(), kReasonBytes));
    for (const std::unique_ptr<Peer> &peer : peers_) {
        if (peer == nullptr) {
            continue;
        }
        if (!peer->is_gone && peer->out_done == peer->out_size) {
            queue(peer.get(), frame, reinterpret_cast<const std::byte *>(reason.data()));
        }
        shutdown(peer->fd, SHUT_WR);
    }
}

} // namespace llaisys::parallel
