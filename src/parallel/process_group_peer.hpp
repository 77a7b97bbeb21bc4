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
    WorkPtr all_reduce(const tensor_t &tensor, ReduceOpType op, bool is_async) const override;
    bool all_reduce_add(const tensor_t &sum, const tensor_t &terms) const override;
    WorkPtr all_gather(const tensor_t &output, const tensor_t &input, bool is_async) const override;
    WorkPtr reduce_scatter(const tensor_t &output, const tensor_t &input, ReduceOpType op,
                           bool is_async) const override;
    WorkPtr broadcast(const tensor_t &tensor, int root, bool is_async) const override;
    WorkPtr scatter(const tensor_t &output, const tensor_t &input, int root,
                    bool is_async) const override;
    WorkPtr gather(const tensor_t &output, const tensor_t &input, int root,
                   bool is_async) const override;
    WorkPtr send(const tensor_t &tensor, int dest_rank, bool is_async) const override;
    WorkPtr recv(const tensor_t &tensor, int src_rank, bool is_async) const override;
    void abort_device() const noexcept override { peers_.abort(); }

    PeerMemory peers_;
};

} // namespace llaisys::parallel
