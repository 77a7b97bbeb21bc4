#include "parallel/peer_memory.hpp"

#include <algorithm>
#include <cstring>
#include <fstream>
#include <map>
#include <thread>
#include <unistd.h>

namespace llaisys::parallel {

using std::chrono::steady_clock;

namespace {

constexpr size_t kMachineBytes = 128;
// Longest wait for ranks that still read this rank's area.
constexpr std::chrono::seconds kReleaseTimeout{1};

// What a rank tells the others.
struct Offer {
    device::SharedMemory memory;
    char machine[kMachineBytes]; // the same for ranks that can share memory
    char error[256];             // empty: none
};

void write_text(char *to, size_t size, const std::string &text) {
    const size_t n = std::min(text.size(), size - 1);
    std::memcpy(to, text.data(), n);
    to[n] = '\0';
}

// The boot of the kernel and the namespace of process ids, in which a process id is unique.
std::string machine_name() {
    std::string boot;
    std::getline(std::ifstream("/proc/sys/kernel/random/boot_id"), boot);
    char space[64] = {};
    if (readlink("/proc/self/ns/pid", space, sizeof space - 1) < 0) {
        space[0] = '\0';
    }
    return boot + space;
}

// Counts the ranks of this process that use an area: the last one releases it, since the kernels of
// a rank may still read the area of another that has left.
class AreaUsers {
public:
    void add(const device::SharedMemory &memory) {
        std::lock_guard<std::mutex> lock(mutex_);
        ++counts_[memory.address];
    }
    // Whether this was the last one.
    bool remove(const device::SharedMemory &memory) {
        std::lock_guard<std::mutex> lock(mutex_);
        if (--counts_[memory.address] > 0) {
            return false;
        }
        counts_.erase(memory.address);
        return true;
    }

private:
    std::mutex mutex_;
    std::map<void *, int> counts_;
};

AreaUsers &area_users() {
    static AreaUsers users;
    return users;
}

std::vector<Offer> gather(const ProcessGroup &host, const Offer &own) {
    std::vector<Offer> all(size_t(host.size()));
    const tensor_t in = Tensor::create({int64_t(sizeof own)}, LLAISYS_DTYPE_I8);
    const tensor_t out = Tensor::create({int64_t(sizeof own) * host.size()}, LLAISYS_DTYPE_I8);
    std::memcpy(in.data(), &own, sizeof own);
    host.AllGather(out, in);
    std::memcpy(all.data(), out.data(), all.size() * sizeof own);
    return all;
}

// Throws the first error of any rank, on every rank.
void agree(const std::vector<Offer> &offers) {
    for (size_t rank = 0; rank < offers.size(); ++rank) {
        if (offers[rank].error[0] != '\0') {
            fail(LLAISYS_ERROR_UNSUPPORTED, "rank ", rank, ": ", std::string(offers[rank].error));
        }
    }
}

} // namespace

PeerMemory::PeerMemory(const GroupOptions &options, const ProcessGroup &host)
    : kernels_(peer_kernels()), runtime_(device::runtime_of(options.device)) {
    require(host.size() <= kMaxPeers, "peer memory serves at most ", kMaxPeers, " ranks, got ",
            host.size());
    peers_.world = host.size();
    peers_.rank = host.rank();
    is_aborted_ = static_cast<uint32_t *>(runtime_.allocate_host(sizeof(uint32_t)));
    *is_aborted_ = 0;
    peers_.is_aborted = is_aborted_;
    try {
        map(options, host);
    } catch (...) {
        release();
        throw;
    }
}

void PeerMemory::map(const GroupOptions &options, const ProcessGroup &host) {
    Offer own{};
    write_text(own.machine, sizeof own.machine, machine_name());
    const auto note_error = [&own](const auto &body) {
        try {
            body();
        } catch (const Error &error) {
            write_text(own.error, sizeof own.error, error.what());
        }
    };
    note_error([&] {
        own.memory = runtime_.allocate_shared(options.device_id, size_t(kernels_.area_bytes));
        area_users().add(own.memory);
        memories_[host.rank()] = own.memory;
    });
    const std::vector<Offer> offers = gather(host, own);
    agree(offers);
    note_error([&] {
        for (int rank = 0; rank < host.size(); ++rank) {
            const Offer &offer = offers[size_t(rank)];
            require(std::strcmp(offer.machine, own.machine) == 0, "rank ", rank,
                    " runs on another machine");
            if (rank == host.rank()) {
                peers_.areas[rank] = static_cast<std::byte *>(own.memory.address);
                continue;
            }
            peers_.areas[rank] =
                static_cast<std::byte *>(runtime_.map_shared(options.device_id, offer.memory));
            memories_[rank] = offer.memory;
            if (offer.memory.process == getpid()) {
                area_users().add(offer.memory);
            }
        }
    });
    agree(gather(host, own));
}

PeerMemory::~PeerMemory() {
    try {
        const auto start = steady_clock::now();
        while (__atomic_load_n(is_aborted_, __ATOMIC_ACQUIRE) == 0 && !kernels_.is_idle(peers_) &&
               steady_clock::now() - start < kReleaseTimeout) {
            std::this_thread::sleep_for(std::chrono::milliseconds(1));
        }
    } catch (const Error &) { // the device is lost; its other users report the error
    }
    release();
}

void PeerMemory::release() noexcept {
    for (int rank = 0; rank < peers_.world; ++rank) {
        const device::SharedMemory &memory = memories_[rank];
        if (memory.address == nullptr) { // not mapped
            continue;
        }
        if (rank != peers_.rank) {
            runtime_.unmap_shared(peers_.areas[rank], memory);
        }
        if (memory.process == getpid() && area_users().remove(memory)) {
            runtime_.release_shared(memory);
        }
    }
    runtime_.release_host(is_aborted_);
}

std::unique_ptr<PeerMemory> PeerMemory::try_create(const GroupOptions &options,
                                                   const ProcessGroup &host) {
    if (device::runtime_of(options.device).allocate_shared == nullptr || host.size() > kMaxPeers) {
        return nullptr;
    }
    try {
        return std::make_unique<PeerMemory>(options, host);
    } catch (const Error &error) {
        if (error.status() != LLAISYS_ERROR_UNSUPPORTED) {
            throw;
        }
        return nullptr;
    }
}

void PeerMemory::all_reduce(const device::Stream &stream, std::byte *data, int64_t count,
                            DType dtype, function::ReduceOpType op) const {
    const int64_t chunk = kPeerChunk / bytes_of(dtype, 1);
    for (int64_t first = 0; first < count; first += chunk) {
        kernels_.all_reduce(stream, peers_, data + bytes_of(dtype, first),
                            std::min(chunk, count - first), dtype, op);
    }
}

void PeerMemory::all_reduce_add(const device::Stream &stream, float *sum, const std::byte *terms,
                                int64_t count, DType dtype) const {
    const int64_t chunk = kPeerChunk / bytes_of(dtype, 1);
    for (int64_t first = 0; first < count; first += chunk) {
        kernels_.all_reduce_add(stream, peers_, sum + first, terms + bytes_of(dtype, first),
                                std::min(chunk, count - first), dtype);
    }
}

void PeerMemory::exchange(const device::Stream &stream, std::byte *out, const std::byte *in,
                          int64_t bytes, int from) const {
    for (int64_t first = 0; first < bytes; first += kPeerChunk) {
        kernels_.exchange(stream, peers_, out == nullptr ? nullptr : out + first,
                          in == nullptr ? nullptr : in + first, std::min(kPeerChunk, bytes - first),
                          from, bytes);
    }
}

void PeerMemory::send(const device::Stream &stream, const std::byte *in, int64_t bytes,
                      int to) const {
    for (int64_t first = 0; first < bytes; first += kPeerMessage) {
        kernels_.send(stream, peers_, in + first, std::min(kPeerMessage, bytes - first), to);
    }
}

void PeerMemory::recv(const device::Stream &stream, std::byte *out, int64_t bytes, int from) const {
    for (int64_t first = 0; first < bytes; first += kPeerMessage) {
        kernels_.recv(stream, peers_, out + first, std::min(kPeerMessage, bytes - first), from);
    }
}

void PeerMemory::abort() const noexcept { __atomic_store_n(is_aborted_, 1U, __ATOMIC_RELEASE); }

} // namespace llaisys::parallel
