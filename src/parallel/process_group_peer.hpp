// Process group over peer memory: ranks of one machine, which may share a GPU (as processes; see
// parallel/peer_kernels.hpp). Reductions add in the order of the ranks.
#pragma once

#include "parallel/peer_memory.hpp"
#include "parallel/process_group_device.hpp"

namespace llaisys::parallel {

class ProcessGroupPeer final : public ProcessGroupDevice {
public:
    // Returns when all ranks have joined.
    explicit ProcessGroupPeer(const GroupOptions &options);
    ~ProcessGroupPeer() override; // waits for pending calls

private:
    void enqueue(Collective *call, const device::Stream &stream) const override;
    bool can_add(const tensor_t &) const override { return true; }
    void abort_device() const noexcept override { peers_.abort(); }

    PeerMemory peers_;
};

} // namespace llaisys::parallel
