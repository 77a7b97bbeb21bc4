// The memory of a group's GPUs that all its ranks can address, and the collectives over it.
#pragma once

#include "parallel/peer_kernels.hpp"
#include "parallel/process_group.hpp"

namespace llaisys::parallel {

class PeerMemory {
public:
    // Every rank calls at the same time; `host` is a CPU group of the same ranks. Throws on every
    // rank when some rank cannot map another's memory: another machine, or GPUs without a link.
    PeerMemory(const GroupOptions &options, const ProcessGroup &host);
    ~PeerMemory(); // the kernels of this rank must have ended
    PeerMemory(const PeerMemory &) = delete;
    PeerMemory &operator=(const PeerMemory &) = delete;

    // Null on every rank when it is not possible.
    static std::unique_ptr<PeerMemory> try_create(const GroupOptions &options,
                                                  const ProcessGroup &host);

    // As PeerKernels, of any size; with `from` -1 the ranks' data are `bytes` apart.
    void all_reduce(const device::Stream &stream, std::byte *data, int64_t count, DType dtype,
                    function::ReduceOpType op) const;
    void all_reduce_add(const device::Stream &stream, float *sum, const std::byte *terms,
                        int64_t count, DType dtype) const;
    void exchange(const device::Stream &stream, std::byte *out, const std::byte *in, int64_t bytes,
                  int from) const;
    void send(const device::Stream &stream, const std::byte *in, int64_t bytes, int to) const;
    void recv(const device::Stream &stream, std::byte *out, int64_t bytes, int from) const;

    // Ends running and later kernels; their results are invalid. Callable from any thread.
    void abort() const noexcept;

private:
    void map(const GroupOptions &options, const ProcessGroup &host);
    void release() noexcept;

    const PeerKernels &kernels_;
    const device::Runtime &runtime_;
    uint32_t *is_aborted_ = nullptr; // pinned
    device::SharedMemory memories_[kMaxPeers] = {};
    Peers peers_;
};

} // namespace llaisys::parallel
