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

WorkPtr ProcessGroup::AllReduce(const tensor_t &tensor, ReduceOpType op, bool is_async) const {
    const CallSite site{OpType::kAllReduce, options(), rank()};
    site.check_tensor("tensor", tensor);
    site.check_reduction(tensor.dtype(), op);
    return submit({site.type, tensor, {}, 0, op}, is_async);
}

bool ProcessGroup::AllReduceAdd(const tensor_t &sum, const tensor_t &terms) const {
    const CallSite site{OpType::kAllReduceAdd, options(), rank()};
    site.check_addition(sum, terms);
    if (!can_add(terms)) {
        return false;
    }
    submit({site.type, sum, terms}, false);
    return true;
}

WorkPtr ProcessGroup::AllGather(const tensor_t &output, const tensor_t &input,
                                bool is_async) const {
    const CallSite site{OpType::kAllGather, options(), rank()};
    site.check_shards("output", output, "input", input);
    return submit({site.type, output, input}, is_async);
}

WorkPtr ProcessGroup::ReduceScatter(const tensor_t &output, const tensor_t &input, ReduceOpType op,
                                    bool is_async) const {
    const CallSite site{OpType::kReduceScatter, options(), rank()};
    site.check_shards("input", input, "output", output);
    site.check_reduction(input.dtype(), op);
    return submit({site.type, output, input, 0, op}, is_async);
}

WorkPtr ProcessGroup::BroadCast(const tensor_t &tensor, int root, bool is_async) const {
    const CallSite site{OpType::kBroadCast, options(), rank()};
    site.check_tensor("tensor", tensor);
    site.check_rank("root", root);
    return submit({site.type, tensor, {}, root}, is_async);
}

WorkPtr ProcessGroup::Scatter(const tensor_t &output, const tensor_t &input, int root,
                              bool is_async) const {
    const CallSite site{OpType::kScatter, options(), rank()};
    site.check_rank("root", root);
    if (rank() == root) {
        site.check_shards("input", input, "output", output);
    } else {
        site.check_tensor("output", output);
    }
    return submit({site.type, output, input, root}, is_async);
}

WorkPtr ProcessGroup::Gather(const tensor_t &output, const tensor_t &input, int root,
                             bool is_async) const {
    const CallSite site{OpType::kGather, options(), rank()};
    site.check_rank("root", root);
    if (rank() == root) {
        site.check_shards("output", output, "input", input);
    } else {
        site.check_tensor("input", input);
    }
    return submit({site.type, output, input, root}, is_async);
}

WorkPtr ProcessGroup::Send(const tensor_t &tensor, int dest_rank, bool is_async) const {
    const CallSite site{OpType::kSend, options(), rank()};
    site.check_tensor("tensor", tensor);
    site.check_peer("dest_rank", dest_rank);
    return submit({site.type, tensor, {}, dest_rank}, is_async);
}

WorkPtr ProcessGroup::Recv(const tensor_t &tensor, int src_rank, bool is_async) const {
    const CallSite site{OpType::kRecv, options(), rank()};
    site.check_tensor("tensor", tensor);
    site.check_peer("src_rank", src_rank);
    return submit({site.type, tensor, {}, src_rank}, is_async);
}

ProcessGroupOne::ProcessGroupOne(const GroupOptions &options) : ProcessGroup(options) {
    require(size() == 1, "group ", name(), " has ", size(), " ranks, expected one");
}

WorkPtr ProcessGroupOne::submit(const Collective &call, bool) const {
    if (call.input.defined() && call.output.data() != call.input.data()) {
        const auto kind = call.output.device() == LLAISYS_DEVICE_CPU
                              ? device::CopyKind::host_to_host
                              : device::CopyKind::device_to_device;
        call.output.storage()->runtime().copy(call.output.data(), call.input.data(),
                                              size_t(call.input.bytes()), kind, nullptr);
    }
    return done_;
}

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
