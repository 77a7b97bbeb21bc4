#include "parallel/socket_exchange.hpp"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <poll.h>
#include <sys/socket.h>

namespace llaisys::parallel {

namespace {

constexpr uint32_t kMagic = 0x4c4c5446; // of a frame
constexpr int kNapMs = 20;              // between looks at the clock and at `abort`
constexpr size_t kReasonBytes = 512;

enum Kind : uint32_t { kRound = 1, kMail = 2, kAbort = 3 };

} // namespace

struct SocketExchange::Frame {
    uint32_t magic = kMagic;
    uint32_t kind = kRound;
    int64_t bytes = 0; // of the body
    CallTag tag;
};

// A connection: what is being sent, what is being received, and what has come.
struct SocketExchange::Peer {
    explicit Peer(Socket connected)
        : socket(std::move(connected)), parts(2 * size_t(kPieceBytes)) {}

    Socket socket;
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

SocketExchange::SocketExchange(const RankSockets &ranks)
    : Exchange(int(ranks.addresses.size()), ranks.rank), parts_(2 * size_t(kPieceBytes)),
      timeout_(ranks.timeout) {
    for (Socket &socket : connect_ranks(ranks)) {
        peers_.push_back(socket.is_open() ? std::make_unique<Peer>(std::move(socket)) : nullptr);
    }
}

SocketExchange::~SocketExchange() = default; // closing the connections is leaving

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
        const ssize_t sent = send(peer->socket.fd(), from, n, MSG_NOSIGNAL | MSG_DONTWAIT | more);
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
        const ssize_t n =
            recv(peer.socket.fd(), to + peer.in_done, size - peer.in_done, MSG_DONTWAIT);
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
            entries[count] = {peer->socket.fd(), short(POLLIN | output), 0};
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

void SocketExchange::check_peers() {
    const std::lock_guard<std::mutex> lock(io_mutex_);
    check_usable();
    for (int i = 0; i < world(); ++i) {
        Peer *peer = peers_[size_t(i)].get();
        if (peer == nullptr) {
            continue;
        }
        read_some(i);
        if (peer->is_gone) {
            give_up(peer->last_words.empty() ? text("rank ", i, " is gone") : peer->last_words);
        }
    }
}

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
            shutdown(peer->socket.fd(), SHUT_RDWR);
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
        shutdown(peer->socket.fd(), SHUT_WR);
    }
}

} // namespace llaisys::parallel
