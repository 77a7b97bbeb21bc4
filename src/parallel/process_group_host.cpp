#include "parallel/process_group_host.hpp"

#include "parallel/reduce.hpp"
#include "parallel/utils.hpp"

#include <algorithm>
#include <array>
#include <cstring>

namespace llaisys::parallel {

// ---- asynchronous calls --------------------------------------------------------------------------

WorkQueue::~WorkQueue() {
    {
        std::lock_guard<std::mutex> lock(mutex_);
        stopping_ = true;
    }
    added_.notify_all();
    if (thread_.joinable()) {
        thread_.join();
    }
}

std::shared_ptr<Work> WorkQueue::add(std::function<void()> call) {
    auto work = std::make_shared<HostWork>();
    {
        std::lock_guard<std::mutex> lock(mutex_);
        if (!thread_.joinable()) {
            thread_ = std::thread([this] { run(); });
        }
        calls_.emplace_back(std::move(call), work);
        ++pending_;
    }
    added_.notify_one();
    return work;
}

bool WorkQueue::is_idle() const {
    std::lock_guard<std::mutex> lock(mutex_);
    return pending_ == 0;
}

void WorkQueue::run() {
    std::unique_lock<std::mutex> lock(mutex_);
    for (;;) {
        added_.wait(lock, [this] { return stopping_ || !calls_.empty(); });
        if (calls_.empty()) {
            return;
        }
        auto [call, work] = std::move(calls_.front());
        calls_.pop_front();
        lock.unlock();
        std::exception_ptr error;
        try {
            call();
        } catch (...) {
            error = std::current_exception();
        }
        call = nullptr; // releases its tensors before the caller wakes up
        lock.lock();
        --pending_;
        work->Finish(std::move(error));
    }
}

// ---- collectives ---------------------------------------------------------------------------------

namespace {

// From this size on, with three or more ranks, each rank reduces one shard and the shards are
// gathered: one more exchange, less arithmetic per rank.
constexpr int64_t kSplitReductionBytes = 32 << 10;

// Calls body(first, n) for [0, count) in chunks of at most `most`; once with n = 0 when count is 0,
// because ranks synchronize for an empty message too.
template <typename Body> void for_chunks(int64_t count, int64_t most, const Body &body) {
    int64_t first = 0;
    do {
        body(first, std::min(most, count - first));
        first += most;
    } while (first < count);
}

void copy_bytes(std::byte *to, const std::byte *from, int64_t bytes) {
    if (bytes > 0) {
        std::memcpy(to, from, size_t(bytes));
    }
}

Fingerprint fingerprint_of(const Collective &call) {
    const bool gathers = call.type == OpType::kAllGather || call.type == OpType::kGather;
    const bool is_message = call.type == OpType::kSend || call.type == OpType::kRecv;
    const tensor_t &part = gathers ? call.input : call.output;
    Fingerprint fingerprint;
    fingerprint.op_type = is_message ? OpType::kSend : call.type; // the sender's fingerprint
    fingerprint.dtype = part.dtype();
    fingerprint.count = part.elements();
    fingerprint.root = is_message ? 0 : call.peer;
    fingerprint.op = call.op;
    return fingerprint;
}

using Inputs = std::array<const void *, Transport::kMaxWorld>;

void all_reduce(Transport &transport, const Collective &call, const Fingerprint &fingerprint) {
    const tensor_t &tensor = call.output;
    const int64_t size = bytes_of(tensor.dtype(), 1);
    const int world = transport.world();
    const int rank = transport.rank();
    Inputs inputs;
    for_chunks(tensor.elements(), Transport::kChunkBytes / size, [&](int64_t first, int64_t n) {
        std::byte *data = tensor.data() + first * size;
        copy_bytes(transport.send_buffer(), data, n * size);
        transport.exchange(fingerprint, n * size);
        const bool is_shared = world > 2 && n * size >= kSplitReductionBytes;
        const int64_t begin = is_shared ? n * rank / world : 0;
        const int64_t end = is_shared ? n * (rank + 1) / world : n;
        for (int r = 0; r < world; ++r) {
            inputs[size_t(r)] = transport.buffer_of(r) + begin * size;
        }
        if (!is_shared) {
            reduce(data, inputs.data(), world, n, tensor.dtype(), call.op);
            return;
        }
        reduce(transport.send_buffer(), inputs.data(), world, end - begin, tensor.dtype(), call.op);
        transport.exchange(fingerprint, (end - begin) * size);
        for (int r = 0; r < world; ++r) {
            const int64_t from = n * r / world;
            copy_bytes(data + from * size, transport.buffer_of(r),
                       (n * (r + 1) / world - from) * size);
        }
    });
}

void reduce_scatter(Transport &transport, const Collective &call, const Fingerprint &fingerprint) {
    const tensor_t &output = call.output;
    const int world = transport.world();
    const int64_t size = bytes_of(output.dtype(), 1);
    Inputs inputs;
    for_chunks(
        output.elements(), Transport::kChunkBytes / (size * world), [&](int64_t first, int64_t n) {
            for (int r = 0; r < world; ++r) {
                copy_bytes(transport.send_buffer() + r * n * size,
                           call.input.data() + (r * output.elements() + first) * size, n * size);
            }
            transport.exchange(fingerprint, world * n * size);
            for (int r = 0; r < world; ++r) {
                inputs[size_t(r)] = transport.buffer_of(r) + transport.rank() * n * size;
            }
            reduce(output.data() + first * size, inputs.data(), world, n, output.dtype(), call.op);
        });
}

// AllGather, and Gather, where only the root has an output.
void gather(Transport &transport, const Collective &call, const Fingerprint &fingerprint) {
    const tensor_t &input = call.input;
    const bool has_output = call.type == OpType::kAllGather || transport.rank() == call.peer;
    for_chunks(input.bytes(), Transport::kChunkBytes, [&](int64_t first, int64_t n) {
        copy_bytes(transport.send_buffer(), input.data() + first, n);
        transport.exchange(fingerprint, n);
        for (int r = 0; r < transport.world() && has_output; ++r) {
            copy_bytes(call.output.data() + r * input.bytes() + first, transport.buffer_of(r), n);
        }
    });
}

void broadcast(Transport &transport, const Collective &call, const Fingerprint &fingerprint) {
    const tensor_t &tensor = call.output;
    const bool is_root = transport.rank() == call.peer;
    for_chunks(tensor.bytes(), Transport::kChunkBytes, [&](int64_t first, int64_t n) {
        if (is_root) {
            copy_bytes(transport.send_buffer(), tensor.data() + first, n);
        }
        transport.exchange(fingerprint, is_root ? n : 0);
        if (!is_root) {
            copy_bytes(tensor.data() + first, transport.buffer_of(call.peer), n);
        }
    });
}

void scatter(Transport &transport, const Collective &call, const Fingerprint &fingerprint) {
    const int64_t bytes = call.output.bytes();
    const bool is_root = transport.rank() == call.peer;
    const int world = transport.world();
    for_chunks(bytes, Transport::kChunkBytes / world, [&](int64_t first, int64_t n) {
        for (int r = 0; r < world && is_root; ++r) {
            copy_bytes(transport.send_buffer() + r * n, call.input.data() + r * bytes + first, n);
        }
        transport.exchange(fingerprint, is_root ? world * n : 0);
        copy_bytes(call.output.data() + first,
                   transport.buffer_of(call.peer) + transport.rank() * n, n);
    });
}

void send_or_receive(Transport &transport, const Collective &call, const Fingerprint &fingerprint) {
    const tensor_t &tensor = call.output;
    for_chunks(tensor.bytes(), Transport::kMessageBytes, [&](int64_t first, int64_t n) {
        if (call.type == OpType::kSend) {
            transport.send_message(call.peer, fingerprint, tensor.data() + first, n);
        } else {
            transport.recv_message(call.peer, fingerprint, tensor.data() + first, n);
        }
    });
}

void run_on(Transport &transport, const Collective &call) {
    const Fingerprint fingerprint = fingerprint_of(call);
    switch (call.type) {
    case OpType::kAllReduce:
        return all_reduce(transport, call, fingerprint);
    case OpType::kReduceScatter:
        return reduce_scatter(transport, call, fingerprint);
    case OpType::kAllGather:
    case OpType::kGather:
        return gather(transport, call, fingerprint);
    case OpType::kBroadCast:
        return broadcast(transport, call, fingerprint);
    case OpType::kScatter:
        return scatter(transport, call, fingerprint);
    case OpType::kSend:
    case OpType::kRecv:
        return send_or_receive(transport, call, fingerprint);
    case OpType::kAllReduceAdd: // can_add() is false
        break;
    }
}

} // namespace

ProcessGroupHost::ProcessGroupHost(const GroupOptions &options,
                                   std::unique_ptr<Transport> transport)
    : ProcessGroup(options), transport_(std::move(transport)) {
    require(options.device == LLAISYS_DEVICE_CPU, "group ", options.name,
            ": its ranks are on the CPU, got device ", int(options.device));
}

void ProcessGroupHost::Abort(const std::string &reason) const noexcept {
    transport_->abort(reason);
}

void ProcessGroupHost::CheckPeers() const { transport_->check_peers(); }

void ProcessGroupHost::run(const Collective &call) const {
    try {
        run_on(*transport_, call);
    } catch (const Error &error) {
        const CallSite site{call.type, options(), rank()};
        fail(error.status(), site.text(), ": ", error.what());
    }
}

// Runs a synchronous call here when nothing is queued before it, else behind that.
WorkPtr ProcessGroupHost::submit(const Collective &call, bool is_async) const {
    if (is_async) {
        return queue_.add([this, call] { run(call); });
    }
    const auto start = std::chrono::steady_clock::now();
    WorkPtr work = done_;
    if (queue_.is_idle()) {
        run(call);
    } else {
        work = queue_.add([this, call] { run(call); });
        work->Synchronize();
    }
    times_.seconds +=
        std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    ++times_.count;
    return work;
}

} // namespace llaisys::parallel
