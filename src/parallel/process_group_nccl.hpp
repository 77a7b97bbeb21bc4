// Process group over NCCL: one GPU per rank. Reductions are bitwise identical on all ranks and in
// all runs; NCCL chooses the order of the additions. Small sums use peer memory where the GPUs can
// access each other's.
#pragma once

#include "parallel/nccl_library.hpp"
#include "parallel/peer_memory.hpp"
#include "parallel/process_group_device.hpp"

namespace llaisys::parallel {

class ProcessGroupNCCL final : public ProcessGroupDevice {
public:
    // Returns when all ranks have joined.
    explicit ProcessGroupNCCL(const GroupOptions &options);
    ~ProcessGroupNCCL() override; // waits for pending calls

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
    // The names of 002 section 2.2.
    void InitSingleProcess(); // a group of one
    void InitMultiProcess();  // several ranks: processes, or threads with a communicator each
    void join(const NcclId &id);

    void check_device() const override;
    void abort_device() const noexcept override;
    void *handle(const device::Stream &stream) const {
        return runtime().handle_of(stream.native());
    }

    const NcclLibrary &nccl_;
    NcclComm comm_ = nullptr;
    std::unique_ptr<PeerMemory> peers_; // null: not possible
};

} // namespace llaisys::parallel
