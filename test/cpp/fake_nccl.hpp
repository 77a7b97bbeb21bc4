// Fake NCCL over threads of this process: each communicator is a ProcessGroupThreads, and calls are
// synchronous. Streams are ignored.
#pragma once

#include "parallel/nccl_library.hpp"
#include "parallel/process_group_host.hpp"

#include <atomic>
#include <cstring>
#include <deque>

namespace fake {

using namespace llaisys;
using namespace llaisys::parallel;

struct Communicator {
    Communicator(const GroupOptions &options) : group(options) {}
    ProcessGroupThreads group;
    std::deque<std::vector<std::byte>> to_itself;
};

struct NcclCounts {
    std::atomic<int> destroyed{0}, aborted{0}, ids{0};
    std::atomic<bool> is_stuck{false}; // calls do nothing, as if a rank were lost
    std::atomic<int> init_fails_on{-1};
    std::atomic<int> async_error{0};
};
inline NcclCounts &nccl_counts() {
    static NcclCounts counts;
    return counts;
}

inline DType dtype_of(NcclType type) {
    switch (type) {
    case NcclType::f32:
        return LLAISYS_DTYPE_F32;
    case NcclType::f16:
        return LLAISYS_DTYPE_F16;
    case NcclType::bf16:
        return LLAISYS_DTYPE_BF16;
    case NcclType::i32:
        return LLAISYS_DTYPE_I32;
    case NcclType::i64:
        return LLAISYS_DTYPE_I64;
    default:
        return LLAISYS_DTYPE_I8;
    }
}

inline function::ReduceOpType op_of(NcclOp op) {
    using function::ReduceOpType;
    const ReduceOpType ops[] = {ReduceOpType::kSum, ReduceOpType::kProd, ReduceOpType::kMax,
                                ReduceOpType::kMin, ReduceOpType::kAvg};
    return ops[int(op)];
}

inline tensor_t copy_of(const void *data, size_t count, NcclType type) {
    const tensor_t tensor = Tensor::create({int64_t(count)}, dtype_of(type));
    if (count > 0 && data != nullptr) {
        std::memcpy(tensor.data(), data, size_t(tensor.bytes()));
    }
    return tensor;
}
inline void copy_back(void *data, const tensor_t &tensor) {
    if (tensor.bytes() > 0) {
        std::memcpy(data, tensor.data(), size_t(tensor.bytes()));
    }
}

inline Communicator &of(NcclComm comm) { return *reinterpret_cast<Communicator *>(comm); }

template <typename Body> NcclResult call(NcclComm comm, const Body &body) {
    try {
        if (!nccl_counts().is_stuck) {
            body(of(comm).group);
        }
        return NcclResult::success;
    } catch (const std::exception &) {
        return NcclResult(6); // "remote error"
    }
}

// Replaces the NCCL library during its lifetime.
class Nccl {
public:
    Nccl() {
        nccl_counts().destroyed = nccl_counts().aborted = nccl_counts().ids = 0;
        nccl_counts().is_stuck = false;
        nccl_counts().init_fails_on = -1;
        nccl_counts().async_error = 0;
        library_.GetUniqueId = [](NcclId *id) {
            std::snprintf(id->bytes, sizeof id->bytes, "fake %d", ++nccl_counts().ids);
            return NcclResult::success;
        };
        library_.CommInitRank = [](NcclComm *comm, int world, NcclId id, int rank) {
            if (rank == nccl_counts().init_fails_on) {
                return NcclResult(2);
            }
            GroupOptions options;
            options.name = "fake NCCL";
            options.init_method = id.bytes;
            options.rank = rank;
            options.ranks.clear();
            for (int i = 0; i < world; ++i) {
                options.ranks.push_back(i);
            }
            *comm = reinterpret_cast<NcclComm>(new Communicator(options));
            return NcclResult::success;
        };
        library_.CommDestroy = [](NcclComm comm) {
            ++nccl_counts().destroyed;
            delete &of(comm);
            return NcclResult::success;
        };
        library_.CommAbort = [](NcclComm comm) {
            ++nccl_counts().aborted;
            delete &of(comm);
            return NcclResult::success;
        };
        library_.CommGetAsyncError = [](NcclComm, NcclResult *error) {
            *error = NcclResult(nccl_counts().async_error.load());
            return NcclResult::success;
        };
        library_.GetErrorString = [](NcclResult) { return "fake failure"; };
        library_.GroupStart = library_.GroupEnd = [] { return NcclResult::success; };
        library_.AllReduce = [](const void *in, void *out, size_t n, NcclType type, NcclOp op,
                                NcclComm comm, void *) {
            return call(comm, [&](const ProcessGroup &group) {
                const tensor_t tensor = copy_of(in, n, type);
                group.AllReduce(tensor, op_of(op));
                copy_back(out, tensor);
            });
        };
        library_.AllGather = [](const void *in, void *out, size_t n, NcclType type, NcclComm comm,
                                void *) {
            return call(comm, [&](const ProcessGroup &group) {
                const tensor_t all = copy_of(nullptr, n * size_t(group.size()), type);
                group.AllGather(all, copy_of(in, n, type));
                copy_back(out, all);
            });
        };
        library_.ReduceScatter = [](const void *in, void *out, size_t n, NcclType type, NcclOp op,
                                    NcclComm comm, void *) {
            return call(comm, [&](const ProcessGroup &group) {
                const tensor_t part = copy_of(nullptr, n, type);
                group.ReduceScatter(part, copy_of(in, n * size_t(group.size()), type), op_of(op));
                copy_back(out, part);
            });
        };
        library_.Broadcast = [](const void *in, void *out, size_t n, NcclType type, int root,
                                NcclComm comm, void *) {
            return call(comm, [&](const ProcessGroup &group) {
                const tensor_t tensor = copy_of(in, n, type);
                group.BroadCast(tensor, root);
                copy_back(out, tensor);
            });
        };
        library_.Send = [](const void *in, size_t n, NcclType type, int to, NcclComm comm, void *) {
            return call(comm, [&](const ProcessGroup &group) {
                const tensor_t tensor = copy_of(in, n, type);
                if (to == group.rank()) {
                    of(comm).to_itself.emplace_back(tensor.data(), tensor.data() + tensor.bytes());
                } else {
                    group.Send(tensor, to);
                }
            });
        };
        library_.Recv = [](void *out, size_t n, NcclType type, int from, NcclComm comm, void *) {
            return call(comm, [&](const ProcessGroup &group) {
                const tensor_t tensor = copy_of(nullptr, n, type);
                if (from == group.rank()) {
                    const std::vector<std::byte> own = std::move(of(comm).to_itself.front());
                    of(comm).to_itself.pop_front();
                    copy_back(tensor.data(), copy_of(own.data(), own.size(), NcclType::i8));
                } else {
                    group.Recv(tensor, from);
                }
                copy_back(out, tensor);
            });
        };
        use_nccl_library(&library_);
    }
    ~Nccl() { use_nccl_library(nullptr); }
    Nccl(const Nccl &) = delete;
    Nccl &operator=(const Nccl &) = delete;

private:
    NcclLibrary library_;
};

} // namespace fake
