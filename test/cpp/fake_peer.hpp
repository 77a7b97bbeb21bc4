// Fake peer memory: host memory, and collectives that spin on it. Ranks are threads.
#pragma once

#include "device/runtime.hpp"
#include "parallel/peer_kernels.hpp"
#include "parallel/reduce.hpp"

#include <atomic>
#include <cstring>
#include <new>
#include <thread>
#include <unistd.h>

namespace fake {

using namespace llaisys;
using namespace llaisys::parallel;

struct PeerCounts {
    std::atomic<int> areas{0}, mapped{0}, all_reduces{0};
    std::atomic<int> map_fails_on{-1}; // a device id
};
inline PeerCounts &peer_counts() {
    static PeerCounts counts;
    return counts;
}

struct PeerArea {
    std::atomic<uint32_t> arrived{0}, finished{0};                        // calls
    std::atomic<uint32_t> sent[kMaxPeers] = {}, received[kMaxPeers] = {}; // by the other rank
    uint32_t n_sent[kMaxPeers] = {}, n_received[kMaxPeers] = {};
    std::byte data[2][kPeerChunk];
    std::byte messages[kMaxPeers][kPeerMessage];
};

inline PeerArea &area_of(const Peers &peers, int rank) {
    return *reinterpret_cast<PeerArea *>(peers.areas[rank]);
}

inline bool wait_for(const Peers &peers, const std::atomic<uint32_t> &counter, uint32_t value) {
    while (int32_t(counter.load() - value) < 0) {
        if (__atomic_load_n(peers.is_aborted, __ATOMIC_ACQUIRE) != 0) {
            return false;
        }
        std::this_thread::yield();
    }
    return true;
}

// Shares `in`; the index of the buffer that all ranks have written, or -1 when aborted.
inline int share(const Peers &peers, const std::byte *in, int64_t bytes) {
    PeerArea &own = area_of(peers, peers.rank);
    const uint32_t epoch = own.arrived.load() + 1;
    const int buffer = int(epoch & 1);
    if (in != nullptr && bytes > 0) {
        std::memcpy(own.data[buffer], in, size_t(bytes));
    }
    own.arrived.store(epoch);
    for (int rank = 0; rank < peers.world; ++rank) {
        if (!wait_for(peers, area_of(peers, rank).arrived, epoch)) {
            return -1;
        }
    }
    return buffer;
}

// Installs fake kernels, and a CPU runtime with shared memory, during its lifetime.
class PeerDevice {
public:
    PeerDevice() {
        peer_counts().areas = peer_counts().mapped = peer_counts().all_reduces = 0;
        peer_counts().map_fails_on = -1;
        table_.allocate_shared = [](int device_id, size_t) {
            ++peer_counts().areas;
            device::SharedMemory memory{};
            memory.address = new PeerArea;
            memory.process = getpid();
            memory.device_id = device_id;
            return memory;
        };
        table_.release_shared = [](const device::SharedMemory &memory) {
            --peer_counts().areas;
            delete static_cast<PeerArea *>(memory.address);
        };
        table_.map_shared = [](int device_id, const device::SharedMemory &memory) -> void * {
            if (device_id == peer_counts().map_fails_on) {
                fail(LLAISYS_ERROR_UNSUPPORTED, "fake GPUs without a link");
            }
            ++peer_counts().mapped;
            return memory.address;
        };
        table_.unmap_shared = [](void *, const device::SharedMemory &) { --peer_counts().mapped; };
        device::use_runtime(LLAISYS_DEVICE_CPU, &table_);
        use_peer_kernels(&kernels_);
    }
    ~PeerDevice() {
        use_peer_kernels(nullptr);
        device::use_runtime(LLAISYS_DEVICE_CPU, nullptr);
    }

private:
    static void all_reduce(const device::Stream &, const Peers &peers, std::byte *data,
                           int64_t count, DType dtype, function::ReduceOpType op) {
        ++peer_counts().all_reduces;
        const int buffer = share(peers, data, bytes_of(dtype, count));
        const void *inputs[kMaxPeers];
        for (int rank = 0; rank < peers.world; ++rank) {
            inputs[rank] = area_of(peers, rank).data[buffer < 0 ? 0 : buffer];
        }
        if (buffer >= 0) {
            reduce(data, inputs, peers.world, count, dtype, op);
        }
        ++area_of(peers, peers.rank).finished;
    }
    static void all_reduce_add(const device::Stream &stream, const Peers &peers, float *sum,
                               const std::byte *terms, int64_t count, DType dtype) {
        const tensor_t reduced = Tensor::create({count}, dtype);
        std::memcpy(reduced.data(), terms, size_t(reduced.bytes()));
        all_reduce(stream, peers, reduced.data(), count, dtype, function::ReduceOpType::kSum);
        visit_real(dtype, [&](auto type) {
            for (int64_t i = 0; i < count; ++i) {
                sum[i] += to_f32(reduced.as<decltype(type)>()[i]);
            }
        });
    }
    static void exchange(const device::Stream &, const Peers &peers, std::byte *out,
                         const std::byte *in, int64_t bytes, int from, int64_t stride) {
        const int buffer = share(peers, in, bytes);
        for (int rank = 0; rank < peers.world && out != nullptr && buffer >= 0; ++rank) {
            if (from < 0 || rank == from) {
                std::memcpy(from < 0 ? out + rank * stride : out, area_of(peers, rank).data[buffer],
                            size_t(bytes));
            }
        }
        ++area_of(peers, peers.rank).finished;
    }
    static bool is_idle(const Peers &peers) {
        PeerArea &own = area_of(peers, peers.rank);
        for (int rank = 0; rank < peers.world; ++rank) {
            if (area_of(peers, rank).finished.load() < own.finished.load() ||
                own.received[rank].load() != own.n_sent[rank]) {
                return false;
            }
        }
        return true;
    }
    static void send(const device::Stream &, const Peers &peers, const std::byte *in, int64_t bytes,
                     int to) {
        PeerArea &own = area_of(peers, peers.rank);
        if (wait_for(peers, own.received[to], own.n_sent[to])) {
            std::memcpy(own.messages[to], in, size_t(bytes));
            area_of(peers, to).sent[peers.rank].store(++own.n_sent[to]);
        }
    }
    static void recv(const device::Stream &, const Peers &peers, std::byte *out, int64_t bytes,
                     int from) {
        PeerArea &own = area_of(peers, peers.rank);
        PeerArea &other = area_of(peers, from);
        if (wait_for(peers, own.sent[from], own.n_received[from] + 1)) {
            std::memcpy(out, other.messages[peers.rank], size_t(bytes));
            other.received[peers.rank].store(++own.n_received[from]);
        }
    }

    // Streams may outlive the fake.
    inline static device::Runtime table_ = device::cpu_runtime();
    PeerKernels kernels_{
        int64_t(sizeof(PeerArea)), all_reduce, all_reduce_add, exchange, send, recv, is_idle};
};

} // namespace fake
