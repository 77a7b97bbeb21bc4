#include "parallel/process_group_nccl.hpp"

#include <cstring>

namespace llaisys::parallel {

using function::ReduceOpType;

namespace {

// Largest reduction by peer memory, whose latency is lower; above, NCCL uses the links better.
constexpr int64_t kPeerSumBytes = 1 << 20;

NcclType type_of(DType dtype) {
    switch (dtype) {
    case LLAISYS_DTYPE_F32:
        return NcclType::f32;
    case LLAISYS_DTYPE_F16:
        return NcclType::f16;
    case LLAISYS_DTYPE_BF16:
        return NcclType::bf16;
    case LLAISYS_DTYPE_I32:
        return NcclType::i32;
    case LLAISYS_DTYPE_I64:
        return NcclType::i64;
    default:
        fail(LLAISYS_ERROR_UNSUPPORTED, "NCCL does not reduce ", name_of(dtype));
    }
}

NcclOp op_of(ReduceOpType op) {
    switch (op) {
    case ReduceOpType::kSum:
        return NcclOp::sum;
    case ReduceOpType::kProd:
        return NcclOp::prod;
    case ReduceOpType::kMin:
        return NcclOp::min;
    case ReduceOpType::kMax:
        return NcclOp::max;
    case ReduceOpType::kAvg:
        return NcclOp::avg;
    }
    fail(LLAISYS_ERROR_INVALID, "reduce_op must be in [0, 4], got ", int(op));
}

void check(const NcclLibrary &nccl, NcclResult result, const char *call) {
    if (result != NcclResult::success) {
        fail(LLAISYS_ERROR_INTERNAL, "NCCL: ", call, ": ", nccl.GetErrorString(result));
    }
}

// Operands of a call that moves bytes of any dtype.
struct Bytes {
    std::byte *data;
    size_t count;
};
Bytes bytes_of(const tensor_t &tensor) { return {tensor.data(), size_t(tensor.bytes())}; }

} // namespace

// ---- setup and teardown ----------------------------------------------------------------------------

ProcessGroupNCCL::ProcessGroupNCCL(const GroupOptions &options)
    : ProcessGroupDevice(options), nccl_(nccl_library()) {
    if (size() == 1) {
        InitSingleProcess();
        return;
    }
    InitMultiProcess();
    start_watching();
}

ProcessGroupNCCL::~ProcessGroupNCCL() {
    finish();
    if (!is_aborted()) {
        nccl_.CommDestroy(comm_);
    }
}

void ProcessGroupNCCL::InitSingleProcess() {
    NcclId id{};
    check(nccl_, nccl_.GetUniqueId(&id), "ncclGetUniqueId");
    join(id);
}

void ProcessGroupNCCL::InitMultiProcess() {
    NcclId id{};
    if (rank() == 0) {
        abort_on_error(host(), [&] { check(nccl_, nccl_.GetUniqueId(&id), "ncclGetUniqueId"); });
    }
    const tensor_t message = Tensor::create({int64_t(sizeof id)}, LLAISYS_DTYPE_I8);
    std::memcpy(message.data(), id.bytes, sizeof id);
    host().BroadCast(message, 0);
    std::memcpy(id.bytes, message.data(), sizeof id);
    abort_on_error(host(), [&] { join(id); });
    peers_ = PeerMemory::try_create(options(), host());
}

void ProcessGroupNCCL::join(const NcclId &id) {
    own_stream().synchronize(); // sets the thread's current device
    check(nccl_, nccl_.CommInitRank(&comm_, size(), id, rank()), "ncclCommInitRank");
}

void ProcessGroupNCCL::check_device() const {
    NcclResult error = NcclResult::success;
    check(nccl_, nccl_.CommGetAsyncError(comm_, &error), "ncclCommGetAsyncError");
    if (error != NcclResult::in_progress) {
        check(nccl_, error, "a collective");
    }
}

void ProcessGroupNCCL::abort_device() const noexcept {
    if (peers_ != nullptr) {
        peers_->abort();
    }
    nccl_.CommAbort(comm_);
}

// ---- collectives ---------------------------------------------------------------------------------

WorkPtr ProcessGroupNCCL::all_reduce(const tensor_t &tensor, ReduceOpType op, bool is_async) const {
    return submit("AllReduce", is_async, {tensor}, [&](const device::Stream &stream) {
        if (peers_ != nullptr && tensor.bytes() <= kPeerSumBytes) {
            return peers_->all_reduce(stream, tensor.data(), tensor.elements(), tensor.dtype(), op);
        }
        check(nccl_,
              nccl_.AllReduce(tensor.data(), tensor.data(), size_t(tensor.elements()),
                              type_of(tensor.dtype()), op_of(op), comm_, handle(stream)),
              "ncclAllReduce");
    });
}

bool ProcessGroupNCCL::all_reduce_add(const tensor_t &sum, const tensor_t &terms) const {
    if (peers_ == nullptr || terms.bytes() > kPeerSumBytes) {
        return false;
    }
    submit("AllReduceAdd", false, {sum, terms}, [&](const device::Stream &stream) {
        peers_->all_reduce_add(stream, sum.as<float>(), terms.data(), terms.elements(),
                               terms.dtype());
    });
    return true;
}

WorkPtr ProcessGroupNCCL::all_gather(const tensor_t &output, const tensor_t &input,
                                     bool is_async) const {
    return submit("AllGather", is_async, {output, input}, [&](const device::Stream &stream) {
        const Bytes from = bytes_of(input);
        check(nccl_,
              nccl_.AllGather(from.data, output.data(), from.count, NcclType::i8, comm_,
                              handle(stream)),
              "ncclAllGather");
    });
}

WorkPtr ProcessGroupNCCL::reduce_scatter(const tensor_t &output, const tensor_t &input,
                                         ReduceOpType op, bool is_async) const {
    return submit("ReduceScatter", is_async, {output, input}, [&](const device::Stream &stream) {
        check(nccl_,
              nccl_.ReduceScatter(input.data(), output.data(), size_t(output.elements()),
                                  type_of(input.dtype()), op_of(op), comm_, handle(stream)),
              "ncclReduceScatter");
    });
}

WorkPtr ProcessGroupNCCL::broadcast(const tensor_t &tensor, int root, bool is_async) const {
    return submit("BroadCast", is_async, {tensor}, [&](const device::Stream &stream) {
        const Bytes all = bytes_of(tensor);
        check(nccl_,
              nccl_.Broadcast(all.data, all.data, all.count, NcclType::i8, root, comm_,
                              handle(stream)),
              "ncclBroadcast");
    });
}

// NCCL has neither Scatter nor Gather: both are a group of sends and receives.
WorkPtr ProcessGroupNCCL::scatter(const tensor_t &output, const tensor_t &input, int root,
                                  bool is_async) const {
    return submit("Scatter", is_async, {output, input}, [&](const device::Stream &stream) {
        const Bytes to = bytes_of(output);
        check(nccl_, nccl_.GroupStart(), "ncclGroupStart");
        for (int peer = 0; rank() == root && peer < size(); ++peer) {
            const std::byte *part = input.data() + size_t(peer) * to.count;
            check(nccl_, nccl_.Send(part, to.count, NcclType::i8, peer, comm_, handle(stream)),
                  "ncclSend");
        }
        check(nccl_, nccl_.Recv(to.data, to.count, NcclType::i8, root, comm_, handle(stream)),
              "ncclRecv");
        check(nccl_, nccl_.GroupEnd(), "ncclGroupEnd");
    });
}

WorkPtr ProcessGroupNCCL::gather(const tensor_t &output, const tensor_t &input, int root,
                                 bool is_async) const {
    return submit("Gather", is_async, {output, input}, [&](const device::Stream &stream) {
        const Bytes from = bytes_of(input);
        check(nccl_, nccl_.GroupStart(), "ncclGroupStart");
        check(nccl_, nccl_.Send(from.data, from.count, NcclType::i8, root, comm_, handle(stream)),
              "ncclSend");
        for (int peer = 0; rank() == root && peer < size(); ++peer) {
            std::byte *part = output.data() + size_t(peer) * from.count;
            check(nccl_, nccl_.Recv(part, from.count, NcclType::i8, peer, comm_, handle(stream)),
                  "ncclRecv");
        }
        check(nccl_, nccl_.GroupEnd(), "ncclGroupEnd");
    });
}

WorkPtr ProcessGroupNCCL::send(const tensor_t &tensor, int dest_rank, bool is_async) const {
    return submit("Send", is_async, {tensor}, [&](const device::Stream &stream) {
        const Bytes all = bytes_of(tensor);
        check(nccl_,
              nccl_.Send(all.data, all.count, NcclType::i8, dest_rank, comm_, handle(stream)),
              "ncclSend");
    });
}

WorkPtr ProcessGroupNCCL::recv(const tensor_t &tensor, int src_rank, bool is_async) const {
    return submit("Recv", is_async, {tensor}, [&](const device::Stream &stream) {
        const Bytes all = bytes_of(tensor);
        check(nccl_, nccl_.Recv(all.data, all.count, NcclType::i8, src_rank, comm_, handle(stream)),
              "ncclRecv");
    });
}

} // namespace llaisys::parallel
