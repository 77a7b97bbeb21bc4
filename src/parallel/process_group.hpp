// A group of ranks that work on one model: each holds a part of the weights, and they combine what
// they get. One object per rank; a rank is a thread or a process with a device of its own.
//
// Every rank makes the same calls with the same sizes in the same order. A call that is not
// asynchronous has finished when it returns and throws when it failed (on a GPU: it is on the
// caller's stream, and CheckResults throws); an asynchronous one reports through its Work, runs
// behind those before it, and keeps the tensors alive until it is over.
// Every error text names the call, the group, the rank and the device. After a failure of
// communication the group is broken: every call of every rank fails with the first reason.
//
// Ranks in arguments are places in the group (GetGroupRank turns a global rank into one). Tensors
// are dense and on the group's device. A wrong argument throws LLAISYS_ERROR_INVALID before
// anything is sent. An object serves one thread at a time.
#pragma once

#include "parallel/reduce_op_type.hpp"
#include "parallel/work.hpp"
#include "tensor/tensor.hpp"

#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

namespace llaisys::parallel {

using tensor_t = Tensor; // a view: copies share the values

// Who a rank is, and in what.
struct GroupOptions {
    std::string name = "default";
    // Where the ranks find each other; what it may say is up to the backend.
    std::string init_method;
    std::vector<int> ranks{0}; // global ranks of the group, in order
    int rank = 0;              // the global rank of the caller
    DeviceType device = LLAISYS_DEVICE_CPU;
    int device_id = 0;
    // Of a GPU: what the caller computes on; and the backend over which its ranks find each other.
    const device::Stream *stream = nullptr;
    std::string host_backend;
    // How long a rank is waited for in a call; 0: as long as it lives.
    std::chrono::milliseconds timeout{300000};
};

// Where the host's time in the calls of a rank went, the wait for the others included.
struct GroupTimes {
    double seconds = 0;
    int64_t count = 0; // calls
};

// The place of a global rank in the group; throws when it is not in it.
int place_of(const GroupOptions &options, int global_rank);

class ProcessGroup {
public:
    explicit ProcessGroup(const GroupOptions &options); // throws when the rank is not in it
    virtual ~ProcessGroup() = default;
    ProcessGroup(const ProcessGroup &) = delete;
    ProcessGroup &operator=(const ProcessGroup &) = delete;

    const std::string &name() const { return options_.name; }
    int size() const { return int(options_.ranks.size()); }
    int rank() const { return rank_; } // of the caller, in the group

    // Throws for a rank that is not in the group.
    virtual int GetGroupRank(int global_rank) const;

    // tensor = the reduction of all ranks' tensors, in rank order: the same bits on all.
    virtual std::shared_ptr<Work>
    AllReduce(const tensor_t &tensor,
              function::ReduceOpType reduce_op = function::ReduceOpType::kSum,
              bool async_op = false) const = 0;
    // output = the inputs of all ranks, one behind the other.
    virtual std::shared_ptr<Work> AllGather(const tensor_t &output, const tensor_t &input,
                                            bool async_op = false) const = 0;
    // output = this rank's n-th of the reduction of all inputs.
    virtual std::shared_ptr<Work>
    ReduceScatter(const tensor_t &output, const tensor_t &input,
                  function::ReduceOpType reduce_op = function::ReduceOpType::kSum,
                  bool async_op = false) const = 0;
    // tensor = the root's.
    virtual std::shared_ptr<Work> BroadCast(const tensor_t &tensor, int root,
                                            bool async_op = false) const = 0;
    // output = this rank's n-th of the root's input; others pass an input without storage.
    virtual std::shared_ptr<Work> Scatter(const tensor_t &output, const tensor_t &input, int root,
                                          bool async_op = false) const = 0;
    // The root's output = all inputs, one behind the other; others pass one without storage.
    virtual std::shared_ptr<Work> Gather(const tensor_t &output, const tensor_t &input, int root,
                                         bool async_op = false) const = 0;
    // To and from one rank; messages between two ranks arrive in order. A message that fits the
    // backend's buffer does not wait for the receiver.
    virtual std::shared_ptr<Work> Send(const tensor_t &tensor, int dest_rank,
                                       bool async_op = false) const = 0;
    virtual std::shared_ptr<Work> Recv(const tensor_t &tensor, int src_rank,
                                       bool async_op = false) const = 0;

    // This rank cannot go on: breaks the group with the reason. Any thread.
    virtual void Abort(const std::string &reason) const noexcept = 0;
    // Throws the reason when the group broke while calls were on a stream: what they gave is
    // worthless. Calls that keep the host have thrown by themselves.
    virtual void CheckResults() const {}
    // Throws when the group is broken or another rank is gone; waits for nothing.
    virtual void CheckPeers() const {}

    // Of the calls that are not asynchronous, since the beginning or the last reset.
    const GroupTimes &times() const { return times_; }
    void reset_times() { times_ = {}; }

protected:
    const GroupOptions &options() const { return options_; }

    mutable GroupTimes times_; // backends whose calls keep the host add to it

private:
    GroupOptions options_;
    int rank_;
};

// A group of one: nothing to do but to copy where output and input are two tensors.
class ProcessGroupOne final : public ProcessGroup {
public:
    explicit ProcessGroupOne(const GroupOptions &options = {});

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
    void Abort(const std::string &) const noexcept override {}

private:
    std::shared_ptr<Work> copy(const char *call, const tensor_t &output,
                               const tensor_t &input) const;

    std::shared_ptr<Work> done_;
};

// Makes groups and finds them again: one object per (init_method, name, rank), shared by all who ask
// while any of them keeps it.
class ProcessGroupFactory {
public:
    static ProcessGroupFactory &Instance();

    // `backend`: "threads" (ranks are threads of this process), "shm" (processes of this machine),
    // "tcp" (processes of any machine), of which a group of one needs none, or "nccl" (GPUs). Throws
    // LLAISYS_ERROR_UNSUPPORTED for another one.
    std::shared_ptr<ProcessGroup> GetOrCreate(const std::string &backend,
                                              const GroupOptions &options);
    // The group named "default" of this thread's process that was made first and still lives;
    // without one, a group of one.
    std::shared_ptr<ProcessGroup> GetDefaultProcessGroup();

private:
    ProcessGroupFactory();

    std::mutex mutex_;
    std::map<std::string, std::weak_ptr<ProcessGroup>> groups_;
    std::shared_ptr<ProcessGroup> one_;
    std::weak_ptr<ProcessGroup> default_;
};

// Runs body; when it throws, breaks the group before the exception goes on: the others would wait in
// vain for this rank's next call.
template <typename Body> void or_abort(const ProcessGroup &group, const Body &body) {
    try {
        body();
    } catch (const std::exception &error) {
        group.Abort(text("rank ", group.rank(), ": ", error.what()));
        throw;
    }
}

} // namespace llaisys::parallel
