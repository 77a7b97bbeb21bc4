#include "parallel/shared_memory_transport.hpp"

#include "base/cpu_relax.hpp"
#include "device/cpu/usable_cores.hpp"

#include <algorithm>
#include <climits>
#include <cstring>
#include <ctime>
#include <linux/futex.h>
#include <sys/syscall.h>
#include <thread>
#include <unistd.h>

namespace llaisys::parallel {

namespace {

using std::chrono::steady_clock;

constexpr auto kSpinTime = std::chrono::microseconds(200);
constexpr auto kPollInterval = std::chrono::milliseconds(20); // between liveness checks
constexpr size_t kPage = 4096;
constexpr size_t kReasonBytes = 512;

enum RankStatus : uint32_t { kNotJoined = 0, kJoined = 1, kLeft = 2 };
enum AbortState : uint32_t { kRunning = 0, kAborting = 1, kAborted = 2 };

// Futex wait on a word of shared memory. Returns when woken, when the word is not `seen`, after
// `limit`, or spuriously.
void sleep_on(const std::atomic<uint32_t> &word, uint32_t seen, std::chrono::milliseconds limit) {
    static_assert(sizeof word == sizeof(uint32_t));
    timespec time{};
    time.tv_sec = time_t(limit.count() / 1000);
    time.tv_nsec = long(limit.count() % 1000) * 1000000;
    syscall(SYS_futex, &word, FUTEX_WAIT, seen, &time, nullptr, 0);
}

void wake_all(const std::atomic<uint32_t> &word) {
    syscall(SYS_futex, &word, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

// Whether a wrapping counter has reached `target`.
bool has_reached(uint32_t value, uint32_t target) { return int32_t(value - target) >= 0; }

size_t round_up_to_page(size_t bytes) { return (bytes + kPage - 1) / kPage * kPage; }

} // namespace

// All zero is the initial state, so that no rank has to initialize it.
struct SharedMemoryTransport::Header {
    std::atomic<uint32_t> world;
    std::atomic<uint32_t> joined;
    std::atomic<uint32_t> abort_state; // AbortState
    char reason[kReasonBytes];         // valid once kAborted
};

// State of a rank. The buffers of all ranks follow the states of all ranks.
struct alignas(64) SharedMemoryTransport::RankState {
    std::atomic<uint32_t> arrived; // last round whose buffer is published
    std::atomic<uint32_t> sleepers;
    std::atomic<uint32_t> state; // RankStatus
    std::atomic<int32_t> pid;    // 0: not joined
    Fingerprint fingerprints[2]; // of an even and an odd round
};

struct alignas(64) SharedMemoryTransport::Mailbox {
    std::atomic<uint32_t> sent; // messages sent so far
    std::atomic<uint32_t> received;
    std::atomic<uint32_t> sleepers; // on `sent` or `received`
    Fingerprint fingerprint;
    int64_t bytes;
    alignas(64) std::byte data[kMessageBytes];
};

size_t SharedMemoryTransport::bytes_for(int world) {
    const size_t n = size_t(world);
    return round_up_to_page(sizeof(Header)) + round_up_to_page(n * sizeof(RankState)) +
           n * 2 * size_t(kChunkBytes) + n * n * sizeof(Mailbox);
}

SharedMemoryTransport::Header &SharedMemoryTransport::header() const {
    return *static_cast<Header *>(memory_.get());
}

SharedMemoryTransport::RankState &SharedMemoryTransport::rank_state(int rank) const {
    std::byte *base = static_cast<std::byte *>(memory_.get()) + round_up_to_page(sizeof(Header));
    return reinterpret_cast<RankState *>(base)[rank];
}

SharedMemoryTransport::Mailbox &SharedMemoryTransport::mailbox(int from, int to) const {
    const size_t n = size_t(world());
    std::byte *base =
        static_cast<std::byte *>(memory_.get()) + bytes_for(world()) - n * n * sizeof(Mailbox);
    return reinterpret_cast<Mailbox *>(base)[size_t(from) * n + size_t(to)];
}

std::byte *SharedMemoryTransport::buffer(int rank, uint32_t round) const {
    std::byte *base = static_cast<std::byte *>(memory_.get()) + round_up_to_page(sizeof(Header)) +
                      round_up_to_page(size_t(world()) * sizeof(RankState));
    return base + (size_t(rank) * 2 + (round & 1)) * size_t(kChunkBytes);
}

SharedMemoryTransport::SharedMemoryTransport(std::shared_ptr<void> memory, const Options &options)
    : Transport(options.world, options.rank), memory_(std::move(memory)), options_(options) {
    // With fewer cores than ranks, a spinning rank would delay the rank that it waits for.
    const double cores = std::thread::hardware_concurrency();
    const double quota = device::cpu_quota();
    const bool has_enough_cores = (quota > 0 ? std::min(quota, cores) : cores) >= options.world;
    spin_ = has_enough_cores ? kSpinTime : std::chrono::microseconds(0);
    join();
}

void SharedMemoryTransport::join() {
    uint32_t size = 0;
    if (!header().world.compare_exchange_strong(size, uint32_t(world()))) {
        require(size == uint32_t(world()), "the group has ", size, " ranks, rank ", rank(),
                " was started for ", world());
    }
    RankState &own = rank_state(rank());
    uint32_t state = kNotJoined;
    require(own.state.compare_exchange_strong(state, kJoined), "rank ", rank(),
            " has already joined", state == kLeft ? " and left" : "");
    own.pid.store(int32_t(getpid()));
    header().joined.fetch_add(1);
    wake_all(header().joined);
}

SharedMemoryTransport::~SharedMemoryTransport() {
    rank_state(rank()).state.store(kLeft);
    wake_all(rank_state(rank()).arrived);
    for (int peer = 0; peer < world(); ++peer) {
        wake_all(mailbox(rank(), peer).sent);
        wake_all(mailbox(peer, rank()).received);
    }
}

void SharedMemoryTransport::wait_for_all() const {
    const auto start = steady_clock::now();
    std::atomic<uint32_t> &joined = header().joined;
    for (uint32_t seen; (seen = joined.load()) != uint32_t(world());) {
        throw_if_aborted();
        for (int peer = 0; peer < world(); ++peer) {
            check_alive(peer);
        }
        check_time(start, text(world() - int(seen), " of ", world(), " ranks"));
        sleep_on(joined, seen, kPollInterval); // last: a rank may die after all have joined
    }
}

// A rank that has not joined counts as alive.
void SharedMemoryTransport::check_alive(int peer) const {
    const RankState &other = rank_state(peer);
    const int32_t pid = other.pid.load();
    const bool is_elsewhere = other.state.load() == kJoined && pid != 0 && pid != int32_t(getpid());
    if (is_elsewhere && options_.is_alive && !options_.is_alive(peer)) {
        abort_and_throw(text("rank ", peer, " (process ", pid, ") has died"));
    }
}

void SharedMemoryTransport::check_time(steady_clock::time_point start,
                                       const std::string &ranks) const {
    if (options_.timeout.count() > 0 && steady_clock::now() - start > options_.timeout) {
        abort_and_throw(text(ranks, " did not respond within ", options_.timeout.count(), " ms"));
    }
}

void SharedMemoryTransport::throw_if_aborted() const {
    uint32_t state = header().abort_state.load();
    if (state == kRunning) {
        return;
    }
    for (int i = 0; i < 1000 && state != kAborted; ++i) { // until the reason is written
        std::this_thread::yield();
        state = header().abort_state.load();
    }
    fail(LLAISYS_ERROR_INTERNAL,
         state == kAborted ? std::string(header().reason) : "the group was aborted");
}

void SharedMemoryTransport::abort_and_throw(const std::string &reason) const {
    const_cast<SharedMemoryTransport *>(this)->abort(reason);
    fail(LLAISYS_ERROR_INTERNAL, reason);
}

void SharedMemoryTransport::abort(const std::string &reason) noexcept {
    uint32_t expected = kRunning;
    if (!header().abort_state.compare_exchange_strong(expected, kAborting)) {
        return;
    }
    const size_t n = std::min(reason.size(), kReasonBytes - 1);
    std::memcpy(header().reason, reason.data(), n);
    header().reason[n] = '\0';
    header().abort_state.store(kAborted);
    for (int i = 0; i < world(); ++i) {
        wake_all(rank_state(i).arrived);
        for (int j = 0; j < world(); ++j) {
            wake_all(mailbox(i, j).sent);
            wake_all(mailbox(i, j).received);
        }
    }
}

// Waits until reached(word), where only `peer` changes the word. Throws when the peer is lost.
template <typename Reached>
void SharedMemoryTransport::wait(std::atomic<uint32_t> &word, std::atomic<uint32_t> &sleepers,
                                 int peer, const Reached &reached) const {
    if (reached(word.load(std::memory_order_acquire))) {
        return;
    }
    const auto start = steady_clock::now();
    while (steady_clock::now() - start < spin_) {
        for (int i = 0; i < 64; ++i) {
            if (reached(word.load(std::memory_order_acquire))) {
                return;
            }
            cpu_relax();
        }
    }
    for (;;) {
        // Counted before the last load of the word; the writer stores the word, then reads the
        // count.
        sleepers.fetch_add(1);
        const uint32_t seen = word.load();
        const bool has_left = rank_state(peer).state.load() == kLeft;
        if (!reached(seen) && !has_left && header().abort_state.load() == kRunning) {
            sleep_on(word, seen, kPollInterval);
        }
        sleepers.fetch_sub(1);
        if (reached(word.load(std::memory_order_acquire))) {
            return;
        }
        throw_if_aborted();
        if (has_left) {
            abort_and_throw(text("rank ", peer, " has left the group"));
        }
        check_alive(peer);
        check_time(start, text("rank ", peer));
    }
}

void SharedMemoryTransport::exchange(const Fingerprint &fingerprint, int64_t) {
    throw_if_aborted();
    const uint32_t round = round_ + 1;
    RankState &own = rank_state(rank());
    own.fingerprints[round & 1] = fingerprint;
    own.arrived.store(round); // publishes the buffer and the fingerprint
    if (own.sleepers.load() > 0) {
        wake_all(own.arrived);
    }
    for (int peer = 0; peer < world(); ++peer) {
        if (peer == rank()) {
            continue;
        }
        RankState &other = rank_state(peer);
        wait(other.arrived, other.sleepers, peer,
             [round](uint32_t value) { return has_reached(value, round); });
        const Fingerprint &theirs = other.fingerprints[round & 1];
        if (!(theirs == fingerprint)) {
            abort_and_throw(text("rank ", rank(), " called ", fingerprint.text(), " while rank ",
                                 peer, " called ", theirs.text()));
        }
    }
    round_ = round;
}

void SharedMemoryTransport::send_message(int to, const Fingerprint &fingerprint, const void *data,
                                         int64_t bytes) {
    throw_if_aborted();
    Mailbox &box = mailbox(rank(), to);
    const uint32_t sent = box.sent.load();
    wait(box.received, box.sleepers, to, [sent](uint32_t received) { return received == sent; });
    box.fingerprint = fingerprint;
    box.bytes = bytes;
    if (bytes > 0) {
        std::memcpy(box.data, data, size_t(bytes));
    }
    box.sent.store(sent + 1);
    if (box.sleepers.load() > 0) {
        wake_all(box.sent);
    }
}

void SharedMemoryTransport::recv_message(int from, const Fingerprint &fingerprint, void *data,
                                         int64_t bytes) {
    throw_if_aborted();
    Mailbox &box = mailbox(from, rank());
    const uint32_t received = box.received.load();
    wait(box.sent, box.sleepers, from, [received](uint32_t sent) { return sent != received; });
    if (!(box.fingerprint == fingerprint) || box.bytes != bytes) {
        abort_and_throw(text("rank ", rank(), " called ", fingerprint.text(), " while rank ", from,
                             " sent ", box.fingerprint.text()));
    }
    if (bytes > 0) {
        std::memcpy(data, box.data, size_t(bytes));
    }
    box.received.store(received + 1);
    if (box.sleepers.load() > 0) {
        wake_all(box.received);
    }
}

void SharedMemoryTransport::check_peers() {
    throw_if_aborted();
    for (int peer = 0; peer < world(); ++peer) {
        if (rank_state(peer).state.load() == kLeft) {
            abort_and_throw(text("rank ", peer, " has left the group"));
        }
        check_alive(peer);
    }
}

} // namespace llaisys::parallel
