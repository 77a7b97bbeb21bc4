#include "parallel/shared_exchange.hpp"

#include "base/pause.hpp"
#include "parallel/futex.hpp"

#include <algorithm>
#include <cstring>
#include <thread>
#include <unistd.h>

namespace llaisys::parallel {

namespace {

using std::chrono::steady_clock;

constexpr auto kSpinTime = std::chrono::microseconds(200); // as the thread pool does
constexpr auto kNap = std::chrono::milliseconds(20);       // between looks at who is alive
constexpr size_t kPage = 4096;
constexpr size_t kReasonBytes = 512;

enum SeatState : uint32_t { kEmpty = 0, kTaken = 1, kLeft = 2 };
enum BrokenState : uint32_t { kWhole = 0, kBreaking = 1, kBroken = 2 };

// Whether a counter that wraps has come to `target`.
bool has_reached(uint32_t value, uint32_t target) { return int32_t(value - target) >= 0; }

size_t up_to_page(size_t bytes) { return (bytes + kPage - 1) / kPage * kPage; }

} // namespace

// All zero is the state before anyone came: nobody has to go first.
struct SharedExchange::Header {
    std::atomic<uint32_t> world;
    std::atomic<uint32_t> joined;
    std::atomic<uint32_t> broken; // BrokenState
    char reason[kReasonBytes];    // readable once broken
};

// A rank's books; its parts lie behind those of all ranks.
struct alignas(64) SharedExchange::Seat {
    std::atomic<uint32_t> arrived; // the last round in which it has ended its writing
    std::atomic<uint32_t> sleepers;
    std::atomic<uint32_t> state; // SeatState
    std::atomic<int32_t> pid;    // 0: not yet
    CallTag tags[2];             // of an even and an odd round
};

struct alignas(64) SharedExchange::Mail {
    std::atomic<uint32_t> written; // messages put so far
    std::atomic<uint32_t> taken;
    std::atomic<uint32_t> sleepers; // on either
    CallTag tag;
    int64_t bytes;
    alignas(64) std::byte data[kMailBytes];
};

size_t SharedExchange::bytes_for(int world) {
    const size_t n = size_t(world);
    return up_to_page(sizeof(Header)) + up_to_page(n * sizeof(Seat)) + n * 2 * size_t(kPieceBytes) +
           n * n * sizeof(Mail);
}

SharedExchange::Header &SharedExchange::header() const {
    return *static_cast<Header *>(memory_.get());
}

SharedExchange::Seat &SharedExchange::seat(int rank) const {
    std::byte *base = static_cast<std::byte *>(memory_.get()) + up_to_page(sizeof(Header));
    return reinterpret_cast<Seat *>(base)[rank];
}

SharedExchange::Mail &SharedExchange::mail(int from, int to) const {
    const size_t n = size_t(world());
    std::byte *base =
        static_cast<std::byte *>(memory_.get()) + bytes_for(world()) - n * n * sizeof(Mail);
    return reinterpret_cast<Mail *>(base)[size_t(from) * n + size_t(to)];
}

const std::byte *SharedExchange::of(int rank) const {
    const std::byte *base = static_cast<std::byte *>(memory_.get()) + up_to_page(sizeof(Header)) +
                            up_to_page(size_t(world()) * sizeof(Seat));
    return base + (size_t(rank) * 2 + (round_ & 1)) * size_t(kPieceBytes);
}

std::byte *SharedExchange::mine() const {
    std::byte *base = static_cast<std::byte *>(memory_.get()) + up_to_page(sizeof(Header)) +
                      up_to_page(size_t(world()) * sizeof(Seat));
    return base + (size_t(rank()) * 2 + ((round_ + 1) & 1)) * size_t(kPieceBytes);
}

SharedExchange::SharedExchange(std::shared_ptr<void> memory, const Options &options)
    : Exchange(options.world, options.rank), memory_(std::move(memory)), options_(options) {
    // With fewer cores than ranks, who spins keeps away the one that it waits for.
    const bool has_room = int(std::thread::hardware_concurrency()) >= options.world;
    spin_ = has_room ? kSpinTime : std::chrono::microseconds(0);
    join();
}

void SharedExchange::join() {
    uint32_t size = 0;
    if (!header().world.compare_exchange_strong(size, uint32_t(world()))) {
        require(size == uint32_t(world()), "the group has ", size, " ranks, rank ", rank(),
                " was started for ", world());
    }
    Seat &own = seat(rank());
    uint32_t state = kEmpty;
    require(own.state.compare_exchange_strong(state, kTaken), "rank ", rank(), " is taken",
            state == kLeft ? " (and was left)" : "");
    own.pid.store(int32_t(getpid()));
    header().joined.fetch_add(1);
    wake_all(header().joined);
}

SharedExchange::~SharedExchange() {
    seat(rank()).state.store(kLeft);
    wake_all(seat(rank()).arrived);
    for (int peer = 0; peer < world(); ++peer) {
        wake_all(mail(rank(), peer).written);
        wake_all(mail(peer, rank()).taken);
    }
}

void SharedExchange::wait_for_all() const {
    const auto start = steady_clock::now();
    std::atomic<uint32_t> &joined = header().joined;
    for (uint32_t seen; (seen = joined.load()) != uint32_t(world());) {
        sleep_on(joined, seen, kNap);
        check_usable();
        for (int peer = 0; peer < world(); ++peer) {
            check_alive(peer);
        }
        check_time(start, text(world() - int(seen), " of ", world(), " ranks"));
    }
}

// A process that never joined cannot be told from one that will.
void SharedExchange::check_alive(int peer) const {
    const Seat &other = seat(peer);
    const int32_t pid = other.pid.load();
    const bool is_elsewhere = other.state.load() == kTaken && pid != 0 && pid != int32_t(getpid());
    if (is_elsewhere && options_.is_alive && !options_.is_alive(peer)) {
        give_up(text("rank ", peer, " (process ", pid, ") has died"));
    }
}

void SharedExchange::check_time(steady_clock::time_point start, const std::string &who) const {
    if (options_.timeout.count() > 0 && steady_clock::now() - start > options_.timeout) {
        give_up(text(who, " did not come within ", options_.timeout.count(), " ms"));
    }
}

void SharedExchange::check_usable() const {
    uint32_t broken = header().broken.load();
    if (broken == kWhole) {
        return;
    }
    for (int i = 0; i < 1000 && broken != kBroken; ++i) { // the breaker writes its reason
        std::this_thread::yield();
        broken = header().broken.load();
    }
    fail(LLAISYS_ERROR_INTERNAL,
         broken == kBroken ? std::string(header().reason) : "the group was broken");
}

void SharedExchange::give_up(const std::string &reason) const {
    const_cast<SharedExchange *>(this)->abort(reason);
    fail(LLAISYS_ERROR_INTERNAL, reason);
}

void SharedExchange::abort(const std::string &reason) noexcept {
    uint32_t whole = kWhole;
    if (!header().broken.compare_exchange_strong(whole, kBreaking)) {
        return;
    }
    const size_t n = std::min(reason.size(), kReasonBytes - 1);
    std::memcpy(header().reason, reason.data(), n);
    header().reason[n] = '\0';
    header().broken.store(kBroken);
    for (int i = 0; i < world(); ++i) {
        wake_all(seat(i).arrived);
        for (int j = 0; j < world(); ++j) {
            wake_all(mail(i, j).written);
            wake_all(mail(i, j).taken);
        }
    }
}

// Waits until reached(word), which only `peer` can bring about. Throws when it cannot any more.
template <typename Reached>
void SharedExchange::wait(std::atomic<uint32_t> &word, std::atomic<uint32_t> &sleepers, int peer,
                          const Reached &reached) const {
    if (reached(word.load(std::memory_order_acquire))) {
        return;
    }
    const auto start = steady_clock::now();
    while (steady_clock::now() - start < spin_) {
        for (int i = 0; i < 64; ++i) {
            if (reached(word.load(std::memory_order_acquire))) {
                return;
            }
            pause_briefly();
        }
    }
    for (;;) {
        // Counted before the last look at the word; who moves it looks the other way round.
        sleepers.fetch_add(1);
        const uint32_t seen = word.load();
        const bool has_left = seat(peer).state.load() == kLeft;
        if (!reached(seen) && !has_left && header().broken.load() == kWhole) {
            sleep_on(word, seen, kNap);
        }
        sleepers.fetch_sub(1);
        if (reached(word.load(std::memory_order_acquire))) {
            return;
        }
        check_usable();
        if (has_left) {
            give_up(text("rank ", peer, " has left the group"));
        }
        check_alive(peer);
        check_time(start, text("rank ", peer));
    }
}

void SharedExchange::meet(const CallTag &tag, int64_t) {
    check_usable();
    const uint32_t round = round_ + 1;
    Seat &own = seat(rank());
    own.tags[round & 1] = tag;
    own.arrived.store(round); // publishes the part and the tag
    if (own.sleepers.load() > 0) {
        wake_all(own.arrived);
    }
    for (int peer = 0; peer < world(); ++peer) {
        if (peer == rank()) {
            continue;
        }
        Seat &other = seat(peer);
        wait(other.arrived, other.sleepers, peer,
             [round](uint32_t value) { return has_reached(value, round); });
        const CallTag &theirs = other.tags[round & 1];
        if (!(theirs == tag)) {
            give_up(text("rank ", rank(), " called ", tag.text(), " while rank ", peer, " called ",
                         theirs.text()));
        }
    }
    round_ = round;
}

void SharedExchange::put_mail(int to, const CallTag &tag, const void *data, int64_t bytes) {
    check_usable();
    Mail &box = mail(rank(), to);
    const uint32_t written = box.written.load();
    wait(box.taken, box.sleepers, to, [written](uint32_t taken) { return taken == written; });
    box.tag = tag;
    box.bytes = bytes;
    if (bytes > 0) {
        std::memcpy(box.data, data, size_t(bytes));
    }
    box.written.store(written + 1);
    if (box.sleepers.load() > 0) {
        wake_all(box.written);
    }
}

void SharedExchange::take_mail(int from, const CallTag &tag, void *data, int64_t bytes) {
    check_usable();
    Mail &box = mail(from, rank());
    const uint32_t taken = box.taken.load();
    wait(box.written, box.sleepers, from, [taken](uint32_t written) { return written != taken; });
    if (!(box.tag == tag) || box.bytes != bytes) {
        give_up(text("rank ", rank(), " called ", tag.text(), " while rank ", from, " sent ",
                     box.tag.text()));
    }
    if (bytes > 0) {
        std::memcpy(data, box.data, size_t(bytes));
    }
    box.taken.store(taken + 1);
    if (box.sleepers.load() > 0) {
        wake_all(box.taken);
    }
}

void SharedExchange::check_peers() {
    check_usable();
    for (int peer = 0; peer < world(); ++peer) {
        if (seat(peer).state.load() == kLeft) {
            give_up(text("rank ", peer, " has left the group"));
        }
        check_alive(peer);
    }
}

} // namespace llaisys::parallel
