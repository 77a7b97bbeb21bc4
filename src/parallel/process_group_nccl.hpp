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

private:
    void enqueue(Collective *call, const device::Stream &stream) const override;
    bool can_add(const tensor_t &terms) const override;
    // The names of 002 section 2.2.
    void InitSingleProcess(); // a group of one
    void InitMultiProcess();  // several ranks: processes, or threads with a communicator each
    void join(const NcclId &id);

    void check(NcclResult result, const char *call) const; // throws unless it is success
    void check_device() const override;
    void abort_device() const noexcept override;

    const NcclLibrary &nccl_;
    NcclComm comm_ = nullptr;
    std::unique_ptr<PeerMemory> peers_; // null: not possible
};

} // namespace llaisys::parallel
