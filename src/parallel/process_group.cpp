#include "parallel/process_group.hpp"

#include "parallel/process_group_host.hpp"
#include "parallel/process_group_nccl.hpp"
#include "parallel/process_group_peer.hpp"
#include "parallel/utils.hpp"

#include <algorithm>

namespace llaisys::parallel {

ProcessGroup::ProcessGroup(const GroupOptions &options)
    : options_(options), rank_(GetGroupRank(options.rank)) {}

int group_rank_of(const GroupOptions &options, int global_rank) {
    const auto found = std::find(options.ranks.begin(), options.ranks.end(), global_rank);
    require(found != options.ranks.end(), "rank ", global_rank, " is not in group ", options.name);
    return int(found - options.ranks.begin());
}

int ProcessGroup::GetGroupRank(int global_rank) const {
    return group_rank_of(options_, global_rank);
}

// ---- a group of one ------------------------------------------------------------------------------

ProcessGroupOne::ProcessGroupOne(const GroupOptions &options) : ProcessGroup(options) {
    require(size() == 1, "group ", name(), " has ", size(), " ranks, expected one");
    auto done = std::make_shared<HostWork>();
    done->Finish(nullptr);
    done_ = std::move(done);
}

std::shared_ptr<Work> ProcessGroupOne::copy(const char *call, const tensor_t &output,
                                            const tensor_t &input) const {
    CallSite{call, options(), rank()}.check_shards("output", output, "input", input);
    if (output.data() != input.data()) {
        const auto kind = output.device() == LLAISYS_DEVICE_CPU
                              ? device::CopyKind::host_to_host
                              : device::CopyKind::device_to_device;
        output.storage()->runtime().copy(output.data(), input.data(), size_t(input.bytes()), kind,
                                         nullptr);
    }
    return done_;
}

std::shared_ptr<Work> ProcessGroupOne::AllReduce(const tensor_t &tensor,
                                                 function::ReduceOpType reduce_op, bool) const {
    const CallSite site{"AllReduce", options(), rank()};
    site.check_tensor("tensor", tensor);
    site.check_reduction(tensor.dtype(), reduce_op);
    return done_;
}

std::shared_ptr<Work> ProcessGroupOne::AllGather(const tensor_t &output, const tensor_t &input,
                                                 bool) const {
    return copy("AllGather", output, input);
}

std::shared_ptr<Work> ProcessGroupOne::ReduceScatter(const tensor_t &output, const tensor_t &input,
                                                     function::ReduceOpType reduce_op, bool) const {
    CallSite{"ReduceScatter", options(), rank()}.check_reduction(input.dtype(), reduce_op);
    return copy("ReduceScatter", output, input);
}

std::shared_ptr<Work> ProcessGroupOne::BroadCast(const tensor_t &tensor, int root, bool) const {
    const CallSite site{"BroadCast", options(), rank()};
    site.check_tensor("tensor", tensor);
    site.check_rank("root", root);
    return done_;
}

std::shared_ptr<Work> ProcessGroupOne::Scatter(const tensor_t &output, const tensor_t &input,
                                               int root, bool) const {
    CallSite{"Scatter", options(), rank()}.check_rank("root", root);
    return copy("Scatter", output, input);
}

std::shared_ptr<Work> ProcessGroupOne::Gather(const tensor_t &output, const tensor_t &input,
                                              int root, bool) const {
    CallSite{"Gather", options(), rank()}.check_rank("root", root);
    return copy("Gather", output, input);
}

std::shared_ptr<Work> ProcessGroupOne::Send(const tensor_t &, int dest_rank, bool) const {
    CallSite{"Send", options(), rank()}.check_peer("dest_rank", dest_rank);
    return done_;
}

std::shared_ptr<Work> ProcessGroupOne::Recv(const tensor_t &, int src_rank, bool) const {
    CallSite{"Recv", options(), rank()}.check_peer("src_rank", src_rank);
    return done_;
}

// ---- the factory ---------------------------------------------------------------------------------

ProcessGroupFactory &ProcessGroupFactory::Instance() {
    static ProcessGroupFactory factory;
    return factory;
}

ProcessGroupFactory::ProcessGroupFactory() : one_(std::make_shared<ProcessGroupOne>()) {}

namespace {

std::shared_ptr<ProcessGroup> create(const std::string &backend, const GroupOptions &options) {
    if (backend == "nccl") {
        return std::make_shared<ProcessGroupNCCL>(options);
    }
    if (backend == "peer") {
        return std::make_shared<ProcessGroupPeer>(options);
    }
    if (options.ranks.size() == 1) {
        return std::make_shared<ProcessGroupOne>(options);
    }
    if (backend == "threads") {
        return std::make_shared<ProcessGroupThreads>(options);
    }
    if (backend == "shm") {
        return std::make_shared<ProcessGroupShm>(options);
    }
    if (backend == "tcp") {
        return std::make_shared<ProcessGroupTcp>(options);
    }
    fail(LLAISYS_ERROR_UNSUPPORTED, "group ", options.name, ": this build has no backend '",
         backend, "'");
}

} // namespace

std::shared_ptr<ProcessGroup> ProcessGroupFactory::GetOrCreate(const std::string &backend,
                                                               const GroupOptions &options) {
    const std::string key = text(options.init_method, '\n', options.name, '\n', options.rank);
    {
        std::lock_guard<std::mutex> lock(mutex_);
        for (auto it = groups_.begin(); it != groups_.end();) {
            it = it->second.expired() ? groups_.erase(it) : std::next(it);
        }
        const auto found = groups_.find(key);
        if (found != groups_.end()) {
            if (std::shared_ptr<ProcessGroup> group = found->second.lock()) {
                return group;
            }
        }
    }
    // Not under the lock: joining may wait for other ranks, which may be threads in this function.
    std::shared_ptr<ProcessGroup> group = create(backend, options);
    std::lock_guard<std::mutex> lock(mutex_);
    groups_[key] = group;
    if (options.name == "default" && default_.expired()) {
        default_ = group;
    }
    return group;
}

std::shared_ptr<ProcessGroup> ProcessGroupFactory::GetDefaultProcessGroup() {
    std::lock_guard<std::mutex> lock(mutex_);
    std::shared_ptr<ProcessGroup> group = default_.lock();
    return group ? group : one_;
}

} // namespace llaisys::parallel
