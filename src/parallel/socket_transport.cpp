#include "parallel/socket_transport.hpp"

#include "parallel/process_group_host.hpp"

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <poll.h>
#include <sys/socket.h>

namespace llaisys::parallel {

namespace {

constexpr uint32_t kMagic = 0x4c4c5446; // of a frame
constexpr int kPollIntervalMs = 20;     // between checks of the timeout and of abort()
constexpr size_t kReasonBytes = 512;

enum Kind : uint32_t { kRound = 1, kMessage = 2, kAbort = 3 };

// tcp://FD:TOKEN@HOST:PORT,HOST:PORT,..
RendezvousOptions parse(const GroupOptions &options) {
    const std::string &where = options.init_method;
    const char *const form = "init_method must be tcp://FD:TOKEN@HOST:PORT,.. with an address for "
                             "each rank, got ";
    const size_t at = where.find('@');
    require(where.rfind("tcp://", 0) == 0 && at != std::string::npos, form,
            at == std::string::npos ? where : where.substr(at)); // without the token
    RendezvousOptions result;
    char *end = nullptr;
    const long number = std::strtol(where.c_str() + 6, &end, 10);
    const size_t colon = size_t(end - where.c_str());
    require(colon > 6 && *end == ':' && number >= 0 && number < 1 << 30, form, where.substr(at));
    result.listener = int(number);
    result.token = where.substr(colon + 1, at - colon - 1);
    for (size_t first = at + 1; first <= where.size();) {
        const size_t comma = std::min(where.find(',', first), where.size());
        result.addresses.push_back(where.substr(first, comma - first));
        first = comma + 1;
    }
    require(result.addresses.size() == options.ranks.size(), form, where.substr(at), " for ",
            options.ranks.size(), " ranks");
    result.rank = group_rank_of(options, options.rank);
    result.timeout = options.timeout;
    return result;
}

} // namespace

ProcessGroupTcp::ProcessGroupTcp(const GroupOptions &options)
    : ProcessGroupHost(options, std::make_unique<SocketTransport>(parse(options))) {}

struct SocketTransport::Frame {
    uint32_t magic = kMagic;
    uint32_t kind = kRound;
    int64_t bytes = 0; // of the body
    Fingerprint fingerprint;
};

// A connection: the frame being sent, the frame being received, and received messages.
struct SocketTransport::Peer {
    explicit Peer(Socket connected)
        : socket(std::move(connected)), buffers(2 * size_t(kChunkBytes)) {}

    Socket socket;
    bool is_lost = false;

    Frame out;
    const std::byte *out_body = nullptr; // the caller's memory, until all is sent
    size_t out_done = 0, out_size = 0;
    bool output_failed = false; // sending failed; the reason may still arrive

    Frame in;
    size_t in_done = 0;             // bytes of the frame, then of its body
    std::byte *in_body = nullptr;   // null: the frame is not complete
    std::vector<std::byte> buffers; // received, two of kChunkBytes
    Fingerprint fingerprints[2];    // of an even and an odd round
    uint32_t rounds = 0;            // received; wraps
    std::deque<std::pair<Fingerprint, std::vector<std::byte>>> messages;
    std::vector<std::byte> message; // being received
    std::string abort_reason;       // received from the peer
};

SocketTransport::SocketTransport(const RendezvousOptions &ranks)
    : Transport(int(ranks.addresses.size()), ranks.rank), buffers_(2 * size_t(kChunkBytes)),
      timeout_(ranks.timeout) {
    for (Socket &socket : connect_ranks(ranks)) {
        peers_.push_back(socket.is_open() ? std::make_unique<Peer>(std::move(socket)) : nullptr);
    }
}

SocketTransport::~SocketTransport() = default; // closes the connections

// ---- frames --------------------------------------------------------------------------------------

void SocketTransport::queue(Peer *peer, const Frame &frame, const std::byte *body) {
    peer->out = frame;
    peer->out_body = body;
    peer->out_done = 0;
    peer->out_size = sizeof frame + size_t(frame.bytes);
    write_some(peer);
}

void SocketTransport::write_some(Peer *peer) {
    while (peer->out_done < peer->out_size && !peer->is_lost) {
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
        } else if (errno != EINTR) { // the peer's abort reason may still be unread
            peer->out_done = peer->out_size;
            peer->output_failed = true;
        }
    }
}

void SocketTransport::read_some(int index) {
    Peer &peer = *peers_[size_t(index)];
    while (!peer.is_lost) {
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
            peer.is_lost = true;
        }
        if (peer.in_done < size) {
            continue;
        }
        peer.in_done = 0;
        if (in_frame) {
            start_body(&peer, index);
        }
        if (!in_frame || peer.in.bytes == 0) {
            finish_body(&peer);
        }
    }
}

// Chooses the destination of the body of a received frame.
void SocketTransport::start_body(Peer *peer, int index) {
    const Frame &frame = peer->in;
    const int64_t most = frame.kind == kRound ? kChunkBytes : kMessageBytes;
    if (frame.magic != kMagic || frame.kind < kRound || frame.kind > kAbort || frame.bytes < 0 ||
        frame.bytes > most) {
        peer->is_lost = true;
        abort_and_throw(text("rank ", index, " sent an invalid frame"));
    }
    if (frame.kind == kRound) {
        peer->in_body = peer->buffers.data() + ((peer->rounds + 1) & 1) * size_t(kChunkBytes);
    } else {
        peer->message.resize(std::max<size_t>(1, size_t(frame.bytes)));
        peer->in_body = peer->message.data();
    }
}

void SocketTransport::finish_body(Peer *peer) {
    const Frame &frame = peer->in;
    peer->in_body = nullptr;
    if (frame.kind == kRound) {
        ++peer->rounds;
        peer->fingerprints[peer->rounds & 1] = frame.fingerprint;
    } else if (frame.kind == kMessage) {
        peer->message.resize(size_t(frame.bytes));
        peer->messages.emplace_back(frame.fingerprint, std::move(peer->message));
        peer->message = {};
    } else {
        peer->abort_reason.assign(reinterpret_cast<const char *>(peer->message.data()),
                                  size_t(frame.bytes));
        peer->is_lost = true;
    }
}

template <typename Waits> void SocketTransport::poll_while(const Waits &waits_for) {
    const Clock::time_point start = Clock::now();
    for (;;) {
        int awaited = -1;
        pollfd entries[kMaxWorld];
        int indices[kMaxWorld];
        nfds_t count = 0;
        for (int i = 0; i < world(); ++i) {
            Peer *peer = peers_[size_t(i)].get();
            if (peer == nullptr) {
                continue;
            }
            const bool is_awaited = waits_for(i, *peer);
            awaited = is_awaited ? i : awaited;
            if (peer->is_lost) {
                if (is_awaited) {
                    const std::string lost = text("rank ", i, " disconnected");
                    abort_and_throw(peer->abort_reason.empty() ? lost : peer->abort_reason);
                }
                continue;
            }
            const short output = peer->out_done < peer->out_size ? POLLOUT : 0;
            entries[count] = {peer->socket.fd(), short(POLLIN | output), 0};
            indices[count++] = i;
        }
        if (awaited < 0) {
            return;
        }
        aborted_.throw_if_set();
        if (timeout_.count() > 0 && Clock::now() - start > timeout_) {
            abort_and_throw(
                text("rank ", awaited, " did not respond within ", timeout_.count(), " ms"));
        }
        if (poll(entries, count, kPollIntervalMs) <= 0) {
            continue;
        }
        for (nfds_t i = 0; i < count; ++i) {
            if ((entries[i].revents & POLLOUT) != 0) {
                write_some(peers_[size_t(indices[i])].get());
            }
            if ((entries[i].revents & ~POLLOUT) != 0) {
                read_some(indices[i]);
            }
        }
    }
}

// ---- calls ---------------------------------------------------------------------------------------

std::byte *SocketTransport::send_buffer() const {
    return const_cast<std::byte *>(buffers_.data()) + ((round_ + 1) & 1) * size_t(kChunkBytes);
}

const std::byte *SocketTransport::buffer_of(int index) const {
    const std::vector<std::byte> &buffers =
        index == rank() ? buffers_ : peers_[size_t(index)]->buffers;
    return buffers.data() + (round_ & 1) * size_t(kChunkBytes);
}

void SocketTransport::exchange(const Fingerprint &fingerprint, int64_t bytes) {
    const std::lock_guard<std::mutex> lock(io_mutex_);
    aborted_.throw_if_set();
    const uint32_t round = round_ + 1;
    const Frame frame{kMagic, kRound, bytes, fingerprint};
    for (const std::unique_ptr<Peer> &peer : peers_) {
        if (peer != nullptr) {
            queue(peer.get(), frame, send_buffer());
        }
    }
    poll_while([round](int, const Peer &peer) {
        return peer.out_done < peer.out_size || int32_t(peer.rounds - round) < 0;
    });
    for (int i = 0; i < world(); ++i) {
        const Peer *peer = peers_[size_t(i)].get();
        if (peer != nullptr && !(peer->fingerprints[round & 1] == fingerprint)) {
            abort_and_throw(text("rank ", rank(), " called ", fingerprint.text(), " while rank ", i,
                                 " called ", peer->fingerprints[round & 1].text()));
        }
    }
    round_ = round;
}

void SocketTransport::send_message(int to, const Fingerprint &fingerprint, const void *data,
                                   int64_t bytes) {
    const std::lock_guard<std::mutex> lock(io_mutex_);
    aborted_.throw_if_set();
    const Frame frame{kMagic, kMessage, bytes, fingerprint};
    queue(peers_[size_t(to)].get(), frame, static_cast<const std::byte *>(data));
    poll_while([to](int i, const Peer &peer) {
        return i == to && (peer.out_done < peer.out_size || peer.output_failed);
    });
}

void SocketTransport::recv_message(int from, const Fingerprint &fingerprint, void *data,
                                   int64_t bytes) {
    const std::lock_guard<std::mutex> lock(io_mutex_);
    aborted_.throw_if_set();
    poll_while([from](int i, const Peer &peer) { return i == from && peer.messages.empty(); });
    Peer &peer = *peers_[size_t(from)];
    const auto [sent, values] = std::move(peer.messages.front());
    peer.messages.pop_front();
    if (!(sent == fingerprint) || int64_t(values.size()) != bytes) {
        abort_and_throw(text("rank ", rank(), " called ", fingerprint.text(), " while rank ", from,
                             " sent ", sent.text()));
    }
    if (bytes > 0) {
        std::memcpy(data, values.data(), size_t(bytes));
    }
}

// ---- failures -------------------------------------------------------------------------------------

void SocketTransport::check_peers() {
    const std::lock_guard<std::mutex> lock(io_mutex_);
    aborted_.throw_if_set();
    for (int i = 0; i < world(); ++i) {
        Peer *peer = peers_[size_t(i)].get();
        if (peer == nullptr) {
            continue;
        }
        read_some(i);
        if (peer->is_lost) {
            abort_and_throw(peer->abort_reason.empty() ? text("rank ", i, " disconnected")
                                                       : peer->abort_reason);
        }
    }
}

void SocketTransport::abort_and_throw(const std::string &reason) {
    if (aborted_.set(reason.substr(0, kReasonBytes))) {
        send_abort(reason);
    }
    fail(LLAISYS_ERROR_INTERNAL, reason);
}

void SocketTransport::abort(const std::string &reason) noexcept {
    if (!aborted_.set(reason.substr(0, kReasonBytes))) {
        return;
    }
    // While another thread sends a frame the reason cannot be sent: close the connections instead.
    const std::unique_lock<std::mutex> lock(io_mutex_, std::try_to_lock);
    if (lock.owns_lock()) {
        send_abort(reason);
        return;
    }
    for (const std::unique_ptr<Peer> &peer : peers_) {
        if (peer != nullptr) {
            shutdown(peer->socket.fd(), SHUT_RDWR);
        }
    }
}

// Sends the reason without blocking. io_mutex_ must be held.
void SocketTransport::send_abort(const std::string &reason) noexcept {
    const Frame frame{kMagic, kAbort, int64_t(std::min(reason.size(), kReasonBytes)), {}};
    for (const std::unique_ptr<Peer> &peer : peers_) {
        if (peer == nullptr) {
            continue;
        }
        if (!peer->is_lost && peer->out_done == peer->out_size) {
            queue(peer.get(), frame, reinterpret_cast<const std::byte *>(reason.data()));
        }
        shutdown(peer->socket.fd(), SHUT_WR);
    }
}

} // namespace llaisys::parallel
