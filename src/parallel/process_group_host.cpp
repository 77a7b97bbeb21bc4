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

Fingerprint fingerprint_of(OpType op_type, const tensor_t &tensor, int root = 0,
                           function::ReduceOpType op = function::ReduceOpType::kSum) {
    Fingerprint fingerprint;
    fingerprint.op_type = op_type;
    fingerprint.dtype = tensor.dtype();
    fingerprint.count = tensor.elements();
    fingerprint.root = root;
    fingerprint.op = op;
    return fingerprint;
}

using Inputs = std::array<const void *, Transport::kMaxWorld>;

} // namespace

ProcessGroupHost::ProcessGroupHost(const GroupOptions &options,
                                   std::unique_ptr<Transport> transport)
    : ProcessGroup(options), transport_(std::move(transport)) {
    require(options.device == LLAISYS_DEVICE_CPU, "group ", options.name,
            ": its ranks are on the CPU, got device ", int(options.device));
    auto done = std::make_shared<HostWork>();
    done->Finish(nullptr);
    done_ = std::move(done);
}

void ProcessGroupHost::Abort(const std::string &reason) const noexcept {
    transport_->abort(reason);
}

void ProcessGroupHost::CheckPeers() const { transport_->check_peers(); }

// Runs the body here when nothing is queued before it, else behind that. `call` outlives it.
template <typename Body>
WorkPtr ProcessGroupHost::submit(const char *call, bool is_async, Body body) const {
    const auto run = [this, call, body = std::move(body)] {
        try {
            body();
        } catch (const Error &error) {
            const CallSite site{call, options(), this->rank()};
            fail(error.status(), site.text(), ": ", error.what());
        }
    };
    if (is_async) {
        return queue_.add(run);
    }
    const auto start = std::chrono::steady_clock::now();
    std::shared_ptr<Work> work = done_;
    if (queue_.is_idle()) {
        run();
    } else {
        work = queue_.add(run);
        work->Synchronize();
    }
    times_.seconds +=
        std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    ++times_.count;
    return work;
}

WorkPtr ProcessGroupHost::all_reduce(const tensor_t &tensor, function::ReduceOpType op,
                                     bool is_async) const {
    return submit("AllReduce", is_async, [=] { all_reduce_chunks(tensor, op); });
}

void ProcessGroupHost::all_reduce_chunks(const tensor_t &tensor, function::ReduceOpType op) const {
    Transport &transport = this->transport();
    const Fingerprint fingerprint = fingerprint_of(OpType::kAllReduce, tensor, 0, op);
    const int64_t size = bytes_of(tensor.dtype(), 1);
    const int world = transport.world();
    Inputs inputs;
    for_chunks(tensor.elements(), Transport::kChunkBytes / size, [&](int64_t first, int64_t n) {
        std::byte *data = tensor.data() + first * size;
        copy_bytes(transport.send_buffer(), data, n * size);
        transport.exchange(fingerprint, n * size);
        const bool is_shared = world > 2 && n * size >= kSplitReductionBytes;
        const int64_t begin = is_shared ? n * rank() / world : 0;
        const int64_t end = is_shared ? n * (rank() + 1) / world : n;
        for (int r = 0; r < world; ++r) {
            inputs[size_t(r)] = transport.buffer_of(r) + begin * size;
        }
        if (!is_shared) {
            reduce(data, inputs.data(), world, n, tensor.dtype(), op);
            return;
        }
        reduce(transport.send_buffer(), inputs.data(), world, end - begin, tensor.dtype(), op);
        transport.exchange(fingerprint, (end - begin) * size);
        for (int r = 0; r < world; ++r) {
            const int64_t from = n * r / world;
            copy_bytes(data + from * size, transport.buffer_of(r),
                       (n * (r + 1) / world - from) * size);
        }
    });
}

WorkPtr ProcessGroupHost::all_gather(const tensor_t &output, const tensor_t &input,
                                     bool is_async) const {
    return submit("AllGather", is_async, [=] {
        Transport &transport = this->transport();
        const Fingerprint fingerprint = fingerprint_of(OpType::kAllGather, input);
        for_chunks(input.bytes(), Transport::kChunkBytes, [&](int64_t first, int64_t n) {
            copy_bytes(transport.send_buffer(), input.data() + first, n);
            transport.exchange(fingerprint, n);
            for (int r = 0; r < transport.world(); ++r) {
                copy_bytes(output.data() + r * input.bytes() + first, transport.buffer_of(r), n);
            }
        });
    });
}

WorkPtr ProcessGroupHost::reduce_scatter(const tensor_t &output, const tensor_t &input,
                                         function::ReduceOpType op, bool is_async) const {
    return submit("ReduceScatter", is_async, [=] {
        Transport &transport = this->transport();
        const Fingerprint fingerprint = fingerprint_of(OpType::kReduceScatter, output, 0, op);
        const int world = transport.world();
        const int64_t size = bytes_of(input.dtype(), 1);
        const int64_t most = Transport::kChunkBytes / (size * world);
        Inputs inputs;
        for_chunks(output.elements(), most, [&](int64_t first, int64_t n) {
            for (int r = 0; r < world; ++r) {
                copy_bytes(transport.send_buffer() + r * n * size,
                           input.data() + (r * output.elements() + first) * size, n * size);
            }
            transport.exchange(fingerprint, world * n * size);
            for (int r = 0; r < world; ++r) {
                inputs[size_t(r)] = transport.buffer_of(r) + rank() * n * size;
            }
            reduce(output.data() + first * size, inputs.data(), world, n, input.dtype(), op);
        });
    });
}

WorkPtr ProcessGroupHost::broadcast(const tensor_t &tensor, int root, bool is_async) const {
    return submit("BroadCast", is_async, [=] {
        Transport &transport = this->transport();
        const Fingerprint fingerprint = fingerprint_of(OpType::kBroadCast, tensor, root);
        for_chunks(tensor.bytes(), Transport::kChunkBytes, [&](int64_t first, int64_t n) {
            if (rank() == root) {
                copy_bytes(transport.send_buffer(), tensor.data() + first, n);
            }
            transport.exchange(fingerprint, rank() == root ? n : 0);
            if (rank() != root) {
                copy_bytes(tensor.data() + first, transport.buffer_of(root), n);
            }
        });
    });
}

WorkPtr ProcessGroupHost::scatter(const tensor_t &output, const tensor_t &input, int root,
                                  bool is_async) const {
    return submit("Scatter", is_async, [=] {
        Transport &transport = this->transport();
        const Fingerprint fingerprint = fingerprint_of(OpType::kScatter, output, root);
        const int64_t most = Transport::kChunkBytes / transport.world();
        for_chunks(output.bytes(), most, [&](int64_t first, int64_t n) {
            for (int r = 0; r < transport.world() && rank() == root; ++r) {
                copy_bytes(transport.send_buffer() + r * n,
                           input.data() + r * output.bytes() + first, n);
            }
            transport.exchange(fingerprint, rank() == root ? transport.world() * n : 0);
            copy_bytes(output.data() + first, transport.buffer_of(root) + rank() * n, n);
        });
    });
}

WorkPtr ProcessGroupHost::gather(const tensor_t &output, const tensor_t &input, int root,
                                 bool is_async) const {
    return submit("Gather", is_async, [=] {
        Transport &transport = this->transport();
        const Fingerprint fingerprint = fingerprint_of(OpType::kGather, input, root);
        for_chunks(input.bytes(), Transport::kChunkBytes, [&](int64_t first, int64_t n) {
            copy_bytes(transport.send_buffer(), input.data() + first, n);
            transport.exchange(fingerprint, n);
            for (int r = 0; r < transport.world() && rank() == root; ++r) {
                copy_bytes(output.data() + r * input.bytes() + first, transport.buffer_of(r), n);
            }
        });
    });
}

WorkPtr ProcessGroupHost::send(const tensor_t &tensor, int dest_rank, bool is_async) const {
    return submit("Send", is_async, [=] {
        const Fingerprint fingerprint = fingerprint_of(OpType::kSend, tensor);
        for_chunks(tensor.bytes(), Transport::kMessageBytes, [&](int64_t first, int64_t n) {
            transport().send_message(dest_rank, fingerprint, tensor.data() + first, n);
        });
    });
}

WorkPtr ProcessGroupHost::recv(const tensor_t &tensor, int src_rank, bool is_async) const {
    return submit("Recv", is_async, [=] {
        const Fingerprint fingerprint =
            fingerprint_of(OpType::kSend, tensor); // the sender's fingerprint
        for_chunks(tensor.bytes(), Transport::kMessageBytes, [&](int64_t first, int64_t n) {
            transport().recv_message(src_rank, fingerprint, tensor.data() + first, n);
        });
    });
}

} // namespace llaisys::parallel
