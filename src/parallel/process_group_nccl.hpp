// Process group over NCCL: one GPU per rank.
//
// A synchronous call is enqueued on the caller's stream and returns before it completes; an
// asynchronous call uses the group's stream. Reductions are bitwise identical on all ranks and in
// all runs; NCCL chooses the order of the additions.
#pragma once

#include "parallel/nccl_library.hpp"
#include "parallel/process_group.hpp"

#include <condition_variable>
#include <deque>
#include <thread>

namespace llaisys::parallel {

struct NcclState;

class ProcessGroupNCCL final : public ProcessGroup {
public:
    // Returns when all ranks have joined. Rendezvous and failure detection use a CPU group with
    // `options.host_backend` and the same init_method; a group of one needs neither. options.stream
    // must outlive the group.
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
    void Abort(const std::string &reason) const noexcept override;
    void CheckResults() const override;

private:
    // The names of 002 section 2.2.
    void InitStreams();
    void InitSingleProcess(); // a group of one
    void InitMultiProcess();  // several ranks: processes, or threads with a communicator each
    void join(const NcclId &id);
    void watch();

    // Enqueues body(stream), which reads and writes `tensors`, after all earlier calls.
    template <typename Body>
    std::shared_ptr<Work> submit(const char *call, bool async_op,
                                 std::initializer_list<tensor_t> tensors, const Body &body) const;

    const NcclLibrary &nccl_;
    const device::Runtime &runtime_;
    std::shared_ptr<const ProcessGroup> host_; // null: a group of one
    NcclComm comm_ = nullptr;
    std::unique_ptr<device::Stream> own_stream_; // of asynchronous calls
    std::shared_ptr<NcclState> state_; // shared with Work objects, which may outlive the group
    std::shared_ptr<Work> sync_work_; // returned by synchronous calls; complete with the latest one
    mutable std::deque<std::shared_ptr<Work>> pending_; // asynchronous calls, oldest first

    std::mutex watch_mutex_;
    std::condition_variable watch_ends_;
    bool is_ending_ = false;
    std::thread watcher_;
};

} // namespace llaisys::parallel
