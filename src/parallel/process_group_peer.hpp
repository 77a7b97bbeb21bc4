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

    std::shared_ptr<Work> AllReduce(const tensor_t &tensor, function::ReduceOpType reduce_op,
                                    bool async_op) const override;
    std::shared_ptr<Work> AllGather(const tensor_t &output, const tensor_t &input,
                                    bool async_op) const override;
    std::shared_ptr<Work> ReduceScatter(const tensor_t &output, const tensor_t &input,
                                        function::ReduceOpType reduce_op,
                                        bool async_op) const override;
    std::shared_ptr<Work> BroadCast(const tensor_t &tensor, int root, bool async_op) const override;
    std::shared_ptr<Work> Scatter(const tensor_t &output, const tensor_t &input, int root,
                                  bool async_op) const override;
    std::shared_ptr<Work> Gather(const tensor_t &output, const tensor_t &input, int root,
                                 bool async_op) const override;
    std::shared_ptr<Work> Send(const tensor_t &tensor, int dest_rank, bool async_op) const override;
    std::shared_ptr<Work> Recv(const tensor_t &tensor, int src_rank, bool async_op) const override;

private:
    void abort_device() const noexcept override { peers_.abort(); }

    PeerMemory peers_;
};

} // namespace llaisys::parallel
