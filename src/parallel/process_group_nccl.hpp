// Groups whose ranks have a GPU each.
//
// A call that is not asynchronous goes on the caller's stream and returns before it is done; an
// asynchronous one goes on a stream of the group. A sum has the same bits on all ranks and in all
// runs, but NCCL chooses in which order it adds.
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
    // Returns when all ranks have come: they find each other over a group on the CPU, which is made
    // with `options.host_backend` and the same init_method, and which tells of ranks that die. A
    // group of one needs neither. options.stream: the caller's; it outlives the group.
    explicit ProcessGroupNCCL(const GroupOptions &options);
    ~ProcessGroupNCCL() override; // waits for what was begun

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
    void InitMultiProcess();  // several ranks; threads, which have a communicator each, go as well
    void join(const NcclId &id);
    void watch();

    // Queues body(stream of NCCL), which reads and writes `tensors`, behind all calls before it.
    template <typename Body>
    std::shared_ptr<Work> submit(const char *call, bool async_op,
                                 std::initializer_list<tensor_t> tensors, const Body &body) const;

    const NcclLibrary &nccl_;
    const device::Runtime &runtime_;
    std::shared_ptr<const ProcessGroup> host_; // null: a group of one
    NcclComm comm_ = nullptr;
    std::unique_ptr<device::Stream> own_stream_; // of asynchronous calls
    std::shared_ptr<NcclState> state_;           // shared with works, which may outlive the group
    std::shared_ptr<Work> queued_; // what calls on the caller's stream return: over with the last
    mutable std::deque<std::shared_ptr<Work>> begun_; // asynchronous and maybe not over, in order

    std::mutex watch_mutex_;
    std::condition_variable watch_ends_;
    bool is_ending_ = false;
    std::thread watcher_;
};

} // namespace llaisys::parallel
