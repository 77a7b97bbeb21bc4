// A group of ranks and its collectives. One object per rank; a rank is a thread or
// a process with its own device.
//
// Every rank makes the same calls with the same sizes in the same order. A synchronous call is
// complete when it returns and throws on failure. (On a GPU it is enqueued on the caller's stream,
// and CheckResults throws.) An asynchronous call reports through its Work, runs after all earlier
// calls and keeps its tensors alive until it is complete. Every error text names the call, the
// group, the rank and the device. A communication failure aborts the group: every call of every
// rank then fails with the first reason.
//
// Rank arguments are ranks within the group (see GetGroupRank). Tensors are contiguous and on the
// group's device. An invalid argument throws LLAISYS_ERROR_INVALID before anything is sent. An
// object serves one thread at a time.
//
// The engine uses AllReduce, AllGather and BroadCast, and Send and Recv between pipeline stages; the
// other calls are part of the seeds' interface (002 section 2.2).
#pragma once

#include "parallel/transport.hpp"
#include "parallel/work.hpp"
#include "tensor/tensor.hpp"

#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

namespace llaisys::parallel {

using tensor_t = Tensor;
using WorkPtr = std::shared_ptr<Work>;
using function::ReduceOpType;

// The members of a group and the caller's rank in it.
struct GroupOptions {
    std::string name = "default";
    // Rendezvous address; its syntax depends on the backend.
    std::string init_method;
    std::vector<int> ranks{0}; // global ranks of the group, in order
    int rank = 0;              // the global rank of the caller
    DeviceType device = LLAISYS_DEVICE_CPU;
    int device_id = 0;
    // GPU only: the caller's compute stream, and the CPU backend for rendezvous and failure
    // detection.
    const device::Stream *stream = nullptr;
    std::string host_backend;
    // Longest wait for another rank in a call; 0: no limit.
    std::chrono::milliseconds timeout{300000};
};

// Host time in the calls of a rank, including waits for other ranks.
struct GroupTimes {
    double seconds = 0;
    int64_t count = 0; // calls
};

// A call of a rank.
struct Collective {
    OpType type;
    tensor_t output; // of a call with one tensor: that tensor
    tensor_t input;
    int peer = 0; // root, or the other rank of Send and Recv
    ReduceOpType op = ReduceOpType::kSum;
    tensor_t scratch{}; // of the backend, alive until the call is complete
};

// The group rank of a global rank; throws when it is not a member.
int group_rank_of(const GroupOptions &options, int global_rank);

class ProcessGroup {
public:
    explicit ProcessGroup(const GroupOptions &options); // throws when the rank is not a member
    virtual ~ProcessGroup() = default;
    ProcessGroup(const ProcessGroup &) = delete;
    ProcessGroup &operator=(const ProcessGroup &) = delete;

    const std::string &name() const { return options_.name; }
    int size() const { return int(options_.ranks.size()); }
    int rank() const { return rank_; } // of the caller, within the group

    // Throws for a rank that is not in the group.
    virtual int GetGroupRank(int global_rank) const;

    // tensor = the reduction of all ranks' tensors in rank order; bitwise identical on all ranks.
    WorkPtr AllReduce(const tensor_t &tensor, ReduceOpType reduce_op = ReduceOpType::kSum,
                      bool async_op = false) const;
    // sum (f32) += the sum of all ranks' terms (real) in rank order, in one pass. False: not
    // supported for these terms; nothing is done, on all ranks.
    bool AllReduceAdd(const tensor_t &sum, const tensor_t &terms) const;
    // output = the inputs of all ranks, concatenated.
    WorkPtr AllGather(const tensor_t &output, const tensor_t &input, bool async_op = false) const;
    // output = this rank's shard of the reduction of all inputs.
    WorkPtr ReduceScatter(const tensor_t &output, const tensor_t &input,
                          ReduceOpType reduce_op = ReduceOpType::kSum, bool async_op = false) const;
    // tensor = the root's tensor.
    WorkPtr BroadCast(const tensor_t &tensor, int root, bool async_op = false) const;
    // output = this rank's shard of the root's input; other ranks pass an input without storage.
    WorkPtr Scatter(const tensor_t &output, const tensor_t &input, int root,
                    bool async_op = false) const;
    // The root's output = all inputs, concatenated; other ranks pass an output without storage.
    WorkPtr Gather(const tensor_t &output, const tensor_t &input, int root,
                   bool async_op = false) const;
    // Point to point. Messages between two ranks arrive in order. A message that fits into the
    // backend's buffer does not wait for the receiver.
    WorkPtr Send(const tensor_t &tensor, int dest_rank, bool async_op = false) const;
    WorkPtr Recv(const tensor_t &tensor, int src_rank, bool async_op = false) const;

    // Aborts the group with a reason. Callable from any thread.
    virtual void Abort(const std::string &reason) const noexcept = 0;
    // Throws the reason when the group was aborted while calls were enqueued on a stream: their
    // results are invalid. Blocking calls throw by themselves.
    virtual void CheckResults() const {}
    // Throws when the group is aborted or another rank is lost. Does not block.
    virtual void CheckPeers() const {}

    // Synchronous calls since construction or the last reset.
    const GroupTimes &times() const { return times_; }
    void reset_times() { times_ = {}; }

protected:
    const GroupOptions &options() const { return options_; }

    // Runs a call whose arguments have been checked.
    virtual WorkPtr submit(const Collective &call, bool is_async) const = 0;
    // Whether submit() runs an AllReduceAdd of these terms.
    virtual bool can_add(const tensor_t &) const { return false; }

    mutable GroupTimes times_; // updated by backends whose calls block

private:
    GroupOptions options_;
    int rank_;
};

// A group of one rank: copies input to output where they are distinct tensors.
class ProcessGroupOne final : public ProcessGroup {
public:
    explicit ProcessGroupOne(const GroupOptions &options = {});

    void Abort(const std::string &) const noexcept override {}

private:
    WorkPtr submit(const Collective &call, bool is_async) const override;

    WorkPtr done_ = completed_work();
};

// States ranks and sizes; has no connection to other ranks.
class DescribedGroup final : public ProcessGroup {
public:
    using ProcessGroup::ProcessGroup;

    void Abort(const std::string &) const noexcept override {}

private:
    WorkPtr submit(const Collective &, bool) const override {
        fail(LLAISYS_ERROR_INTERNAL, "group ", name(), " has no connection");
    }
};

// Creates groups: one live object per (init_method, name, rank), shared by its callers.
class ProcessGroupFactory {
public:
    static ProcessGroupFactory &Instance();

    // `backend`: "threads" (ranks are threads of this process), "shm" (processes of this machine),
    // "tcp" (processes of any machine), "nccl" (GPUs) or "peer" (GPUs that the ranks may share);
    // ignored for one rank on a CPU. Throws LLAISYS_ERROR_UNSUPPORTED for any other.
    std::shared_ptr<ProcessGroup> GetOrCreate(const std::string &backend,
                                              const GroupOptions &options);
    // The oldest live group named "default" of this process; without one, a group of one.
    std::shared_ptr<ProcessGroup> GetDefaultProcessGroup();

private:
    ProcessGroupFactory();

    std::mutex mutex_;
    std::map<std::string, std::weak_ptr<ProcessGroup>> groups_;
    std::shared_ptr<ProcessGroup> one_;
    std::weak_ptr<ProcessGroup> default_;
};

// Runs body; when it throws, aborts the group before rethrowing, so that no rank waits for this
// one.
template <typename Body> void abort_on_error(const ProcessGroup &group, const Body &body) {
    try {
        body();
    } catch (const std::exception &error) {
        group.Abort(text("rank ", group.rank(), ": ", error.what()));
        throw;
    }
}

} // namespace llaisys::parallel
