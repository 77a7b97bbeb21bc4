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
    constexpr NcclOp ops[] = {NcclOp::sum, NcclOp::prod, NcclOp::min, NcclOp::max, NcclOp::avg};
    return ops[size_t(op)];
}

} // namespace

void ProcessGroupNCCL::check(NcclResult result, const char *call) const {
    if (result != NcclResult::success) {
        fail(LLAISYS_ERROR_INTERNAL, "NCCL: ", call, ": ", nccl_.GetErrorString(result));
    }
}

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
    check(nccl_.GetUniqueId(&id), "ncclGetUniqueId");
    join(id);
}

void ProcessGroupNCCL::InitMultiProcess() {
    NcclId id{};
    if (rank() == 0) {
        abort_on_error(host(), [&] { check(nccl_.GetUniqueId(&id), "ncclGetUniqueId"); });
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
    check(nccl_.CommInitRank(&comm_, size(), id, rank()), "ncclCommInitRank");
}

void ProcessGroupNCCL::check_device() const {
    NcclResult error = NcclResult::success;
    check(nccl_.CommGetAsyncError(comm_, &error), "ncclCommGetAsyncError");
    if (error != NcclResult::in_progress) {
        check(error, "a collective");
    }
}

void ProcessGroupNCCL::abort_device() const noexcept {
    if (peers_ != nullptr) {
        peers_->abort();
    }
    nccl_.CommAbort(comm_);
}

bool ProcessGroupNCCL::can_add(const tensor_t &terms) const {
    return peers_ != nullptr && terms.bytes() <= kPeerSumBytes;
}

// Calls that do not reduce move bytes of any dtype. NCCL has neither Scatter nor Gather: both are a
// group of sends and receives.
void ProcessGroupNCCL::enqueue(Collective *call, const device::Stream &stream) const {
    const tensor_t &output = call->output;
    const tensor_t &input = call->input;
    void *on = runtime().handle_of(stream.native());
    const auto send = [&](const std::byte *from, int64_t bytes, int to) {
        check(nccl_.Send(from, size_t(bytes), NcclType::i8, to, comm_, on), "ncclSend");
    };
    const auto recv = [&](std::byte *to, int64_t bytes, int from) {
        check(nccl_.Recv(to, size_t(bytes), NcclType::i8, from, comm_, on), "ncclRecv");
    };
    switch (call->type) {
    case OpType::kAllReduce:
        if (peers_ != nullptr && output.bytes() <= kPeerSumBytes) {
            return peers_->all_reduce(stream, output.data(), output.elements(), output.dtype(),
                                      call->op);
        }
        return check(nccl_.AllReduce(output.data(), output.data(), size_t(output.elements()),
                                     type_of(output.dtype()), op_of(call->op), comm_, on),
                     "ncclAllReduce");
    case OpType::kAllReduceAdd:
        return peers_->all_reduce_add(stream, output.as<float>(), input.data(), input.elements(),
                                      input.dtype());
    case OpType::kAllGather:
        return check(nccl_.AllGather(input.data(), output.data(), size_t(input.bytes()),
                                     NcclType::i8, comm_, on),
                     "ncclAllGather");
    case OpType::kReduceScatter:
        return check(nccl_.ReduceScatter(input.data(), output.data(), size_t(output.elements()),
                                         type_of(input.dtype()), op_of(call->op), comm_, on),
                     "ncclReduceScatter");
    case OpType::kBroadCast:
        return check(nccl_.Broadcast(output.data(), output.data(), size_t(output.bytes()),
                                     NcclType::i8, call->peer, comm_, on),
                     "ncclBroadcast");
    case OpType::kScatter:
        check(nccl_.GroupStart(), "ncclGroupStart");
        for (int peer = 0; rank() == call->peer && peer < size(); ++peer) {
            send(input.data() + peer * output.bytes(), output.bytes(), peer);
        }
        recv(output.data(), output.bytes(), call->peer);
        return check(nccl_.GroupEnd(), "ncclGroupEnd");
    case OpType::kGather:
        check(nccl_.GroupStart(), "ncclGroupStart");
        send(input.data(), input.bytes(), call->peer);
        for (int peer = 0; rank() == call->peer && peer < size(); ++peer) {
            recv(output.data() + peer * input.bytes(), input.bytes(), peer);
        }
        return check(nccl_.GroupEnd(), "ncclGroupEnd");
    case OpType::kSend:
        return send(output.data(), output.bytes(), call->peer);
    case OpType::kRecv:
        return recv(output.data(), output.bytes(), call->peer);
    }
}

} // namespace llaisys::parallel
