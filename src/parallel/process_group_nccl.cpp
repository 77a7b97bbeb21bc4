#include "parallel/process_group_nccl.hpp"

#include "parallel/utils.hpp"
#include "parallel/work_nccl.hpp"

#include <cstring>

namespace llaisys::parallel {

using function::ReduceOpType;
using std::chrono::milliseconds;
using std::chrono::steady_clock;

namespace {

constexpr milliseconds kWatchInterval{100};
// Time for running calls to return before ncclCommAbort.
constexpr milliseconds kAbortGracePeriod{2000};

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
    : ProcessGroup(options), nccl_(nccl_library()), runtime_(device::runtime_of(options.device)),
      state_(std::make_shared<NcclState>()) {
    require(options.stream != nullptr && options.stream->type() == options.device &&
                options.stream->device_id() == options.device_id,
            "group ", name(), ": its calls need a stream of device ", options.device_id);
    InitStreams();
    if (size() == 1) {
        InitSingleProcess();
        return;
    }
    InitMultiProcess();
    watcher_ = std::thread([this] { watch(); });
}

ProcessGroupNCCL::~ProcessGroupNCCL() {
    if (!state_->is_aborted.load()) {
        try {
            own_stream_->synchronize();
            this->options().stream->synchronize();
        } catch (const Error &) { // the device is lost; its other users report the error
        }
    }
    {
        std::lock_guard<std::mutex> lock(watch_mutex_);
        is_ending_ = true;
    }
    watch_ends_.notify_all();
    if (watcher_.joinable()) {
        watcher_.join();
    }
    if (!state_->is_aborted.load()) {
        nccl_.CommDestroy(comm_);
    }
}

void ProcessGroupNCCL::InitStreams() {
    const GroupOptions &given = options();
    own_stream_ = std::make_unique<device::Stream>(given.device, given.device_id, 1);
    sync_work_ = std::make_shared<WorkNccl>(given, state_, std::vector<tensor_t>());
}

void ProcessGroupNCCL::InitSingleProcess() {
    NcclId id{};
    check(nccl_, nccl_.GetUniqueId(&id), "ncclGetUniqueId");
    join(id);
}

void ProcessGroupNCCL::InitMultiProcess() {
    GroupOptions on_host = options();
    on_host.name += " on the host";
    on_host.device = LLAISYS_DEVICE_CPU;
    on_host.device_id = 0;
    on_host.stream = nullptr;
    host_ = ProcessGroupFactory::Instance().GetOrCreate(options().host_backend, on_host);
    NcclId id{};
    if (rank() == 0) {
        abort_on_error(*host_, [&] { check(nccl_, nccl_.GetUniqueId(&id), "ncclGetUniqueId"); });
    }
    const tensor_t message = Tensor::create({int64_t(sizeof id)}, LLAISYS_DTYPE_I8);
    std::memcpy(message.data(), id.bytes, sizeof id);
    host_->BroadCast(message, 0);
    std::memcpy(id.bytes, message.data(), sizeof id);
    abort_on_error(*host_, [&] { join(id); });
}

void ProcessGroupNCCL::join(const NcclId &id) {
    runtime_.synchronize(own_stream_->native()); // sets the thread's current device
    check(nccl_, nccl_.CommInitRank(&comm_, size(), id, rank()), "ncclCommInitRank");
}

// Aborts the communicator when a rank is lost: NCCL kernels on the other GPUs would wait forever.
void ProcessGroupNCCL::watch() {
    std::unique_lock<std::mutex> lock(watch_mutex_);
    while (!watch_ends_.wait_for(lock, kWatchInterval, [this] { return is_ending_; })) {
        if (state_->is_aborted.load()) {
            return;
        }
        try {
            host_->CheckPeers();
            NcclResult error = NcclResult::success;
            check(nccl_, nccl_.CommGetAsyncError(comm_, &error), "ncclCommGetAsyncError");
            if (error != NcclResult::in_progress) {
                check(nccl_, error, "a collective");
            }
        } catch (const Error &error) {
            Abort(error.what());
            return;
        }
    }
}

void ProcessGroupNCCL::Abort(const std::string &reason) const noexcept {
    {
        std::lock_guard<std::mutex> lock(state_->mutex);
        if (state_->is_aborted.load()) {
            return;
        }
        state_->reason = reason;
        state_->is_aborted.store(true); // later calls throw
    }
    if (host_ != nullptr) {
        host_->Abort(reason);
    }
    const auto start = steady_clock::now();
    while (state_->calls.load() > 0 && steady_clock::now() - start < kAbortGracePeriod) {
        std::this_thread::sleep_for(kNcclPoll);
    }
    nccl_.CommAbort(comm_);
}

void ProcessGroupNCCL::CheckResults() const { state_->throw_if_aborted(); }

// ---- collectives ---------------------------------------------------------------------------------

template <typename Body>
std::shared_ptr<Work> ProcessGroupNCCL::submit(const char *call, bool async_op,
                                               std::initializer_list<tensor_t> tensors,
                                               const Body &body) const {
    while (!pending_.empty() && pending_.front()->IsCompleted()) {
        pending_.pop_front();
    }
    void *const stream = options().stream->native();
    void *const used = async_op ? own_stream_->native() : stream;
    const std::shared_ptr<Work> work =
        async_op ? std::make_shared<WorkNccl>(options(), state_, tensors) : sync_work_;
    state_->calls.fetch_add(1);
    try {
        state_->throw_if_aborted();
        if (async_op) {
            runtime_.record_event(work->ready_event(), stream);
            runtime_.wait_event(work->ready_event(), used);
        } else if (!pending_.empty()) {
            pending_.back()->WaitNonBlocking();
        }
        body(runtime_.handle_of(used));
        runtime_.record_event(work->done_event(), used);
    } catch (const Error &error) {
        state_->calls.fetch_sub(1);
        const CallSite site{call, options(), rank()};
        const std::string reason = text(site.text(), ": ", error.what());
        Abort(error.what());
        fail(error.status(), reason);
    }
    state_->calls.fetch_sub(1);
    if (async_op) {
        pending_.push_back(work);
    }
    return work;
}

std::shared_ptr<Work> ProcessGroupNCCL::AllReduce(const tensor_t &tensor, ReduceOpType reduce_op,
                                                  bool async_op) const {
    const CallSite site{"AllReduce", options(), rank()};
    site.check_tensor("tensor", tensor);
    site.check_reduction(tensor.dtype(), reduce_op);
    return submit("AllReduce", async_op, {tensor}, [&](void *stream) {
        check(nccl_,
              nccl_.AllReduce(tensor.data(), tensor.data(), size_t(tensor.elements()),
                              type_of(tensor.dtype()), op_of(reduce_op), comm_, stream),
              "ncclAllReduce");
    });
}

std::shared_ptr<Work> ProcessGroupNCCL::AllGather(const tensor_t &output, const tensor_t &input,
                                                  bool async_op) const {
    CallSite{"AllGather", options(), rank()}.check_shards("output", output, "input", input);
    return submit("AllGather", async_op, {output, input}, [&](void *stream) {
        const Bytes from = bytes_of(input);
        check(nccl_,
              nccl_.AllGather(from.data, output.data(), from.count, NcclType::i8, comm_, stream),
              "ncclAllGather");
    });
}

std::shared_ptr<Work> ProcessGroupNCCL::ReduceScatter(const tensor_t &output, const tensor_t &input,
                                                      ReduceOpType reduce_op, bool async_op) const {
    const CallSite site{"ReduceScatter", options(), rank()};
    site.check_shards("input", input, "output", output);
    site.check_reduction(input.dtype(), reduce_op);
    return submit("ReduceScatter", async_op, {output, input}, [&](void *stream) {
        check(nccl_,
              nccl_.ReduceScatter(input.data(), output.data(), size_t(output.elements()),
                                  type_of(input.dtype()), op_of(reduce_op), comm_, stream),
              "ncclReduceScatter");
    });
}

std::shared_ptr<Work> ProcessGroupNCCL::BroadCast(const tensor_t &tensor, int root,
                                                  bool async_op) const {
    const CallSite site{"BroadCast", options(), rank()};
    site.check_tensor("tensor", tensor);
    site.check_rank("root", root);
    return submit("BroadCast", async_op, {tensor}, [&](void *stream) {
        const Bytes all = bytes_of(tensor);
        check(nccl_,
              nccl_.Broadcast(all.data, all.data, all.count, NcclType::i8, root, comm_, stream),
              "ncclBroadcast");
    });
}

// NCCL has neither Scatter nor Gather: both are a group of sends and receives.
std::shared_ptr<Work> ProcessGroupNCCL::Scatter(const tensor_t &output, const tensor_t &input,
                                                int root, bool async_op) const {
    const CallSite site{"Scatter", options(), rank()};
    site.check_rank("root", root);
    if (rank() == root) {
        site.check_shards("input", input, "output", output);
    } else {
        site.check_tensor("output", output);
    }
    return submit("Scatter", async_op, {output, input}, [&](void *stream) {
        const Bytes to = bytes_of(output);
        check(nccl_, nccl_.GroupStart(), "ncclGroupStart");
        for (int peer = 0; rank() == root && peer < size(); ++peer) {
            const std::byte *part = input.data() + size_t(peer) * to.count;
            check(nccl_, nccl_.Send(part, to.count, NcclType::i8, peer, comm_, stream), "ncclSend");
        }
        check(nccl_, nccl_.Recv(to.data, to.count, NcclType::i8, root, comm_, stream), "ncclRecv");
        check(nccl_, nccl_.GroupEnd(), "ncclGroupEnd");
    });
}

std::shared_ptr<Work> ProcessGroupNCCL::Gather(const tensor_t &output, const tensor_t &input,
                                               int root, bool async_op) const {
    const CallSite site{"Gather", options(), rank()};
    site.check_rank("root", root);
    if (rank() == root) {
        site.check_shards("output", output, "input", input);
    } else {
        site.check_tensor("input", input);
    }
    return submit("Gather", async_op, {output, input}, [&](void *stream) {
        const Bytes from = bytes_of(input);
        check(nccl_, nccl_.GroupStart(), "ncclGroupStart");
        check(nccl_, nccl_.Send(from.data, from.count, NcclType::i8, root, comm_, stream),
              "ncclSend");
        for (int peer = 0; rank() == root && peer < size(); ++peer) {
            std::byte *part = output.data() + size_t(peer) * from.count;
            check(nccl_, nccl_.Recv(part, from.count, NcclType::i8, peer, comm_, stream),
                  "ncclRecv");
        }
        check(nccl_, nccl_.GroupEnd(), "ncclGroupEnd");
    });
}

std::shared_ptr<Work> ProcessGroupNCCL::Send(const tensor_t &tensor, int dest_rank,
                                             bool async_op) const {
    const CallSite site{"Send", options(), rank()};
    site.check_tensor("tensor", tensor);
    site.check_peer("dest_rank", dest_rank);
    return submit("Send", async_op, {tensor}, [&](void *stream) {
        const Bytes all = bytes_of(tensor);
        check(nccl_, nccl_.Send(all.data, all.count, NcclType::i8, dest_rank, comm_, stream),
              "ncclSend");
    });
}

std::shared_ptr<Work> ProcessGroupNCCL::Recv(const tensor_t &tensor, int src_rank,
                                             bool async_op) const {
    const CallSite site{"Recv", options(), rank()};
    site.check_tensor("tensor", tensor);
    site.check_peer("src_rank", src_rank);
    return submit("Recv", async_op, {tensor}, [&](void *stream) {
        const Bytes all = bytes_of(tensor);
        check(nccl_, nccl_.Recv(all.data, all.count, NcclType::i8, src_rank, comm_, stream),
              "ncclRecv");
    });
}

} // namespace llaisys::parallel
