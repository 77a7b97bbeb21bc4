#include "parallel/process_group_shared.hpp"

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
        call = nullptr; // lets its tensors go before anyone is told
        lock.lock();
        --pending_;
        work->Finish(std::move(error));
    }
}

// ---- collectives ---------------------------------------------------------------------------------

namespace {

// From here on three or more ranks share the work of a reduction: a meeting more, but each adds up
// its own part only.
constexpr int64_t kSharedReduction = 32 << 10;

// Calls body(first, n) for [0, count) in pieces of at most `most`; once with n = 0 when count is 0,
// because ranks meet for an empty message too.
template <typename Body> void for_pieces(int64_t count, int64_t most, const Body &body) {
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

CallTag tag_of(Call call, const tensor_t &part, int root = 0,
               function::ReduceOpType op = function::ReduceOpType::kSum) {
    CallTag tag;
    tag.call = call;
    tag.dtype = part.dtype();
    tag.count = part.elements();
    tag.root = root;
    tag.op = op;
    return tag;
}

using Inputs = std::array<const void *, Exchange::kMaxWorld>;

} // namespace

ProcessGroupShared::ProcessGroupShared(const GroupOptions &options,
                                       std::unique_ptr<Exchange> exchange)
    : ProcessGroup(options), exchange_(std::move(exchange)) {
    require(options.device == LLAISYS_DEVICE_CPU, "group ", options.name,
            ": its ranks are on the CPU, got device ", int(options.device));
    auto done = std::make_shared<HostWork>();
    done->Finish(nullptr);
    done_ = std::move(done);
}

void ProcessGroupShared::Abort(const std::string &reason) const noexcept {
    exchange_->abort(reason);
}

void ProcessGroupShared::CheckPeers() const { exchange_->check_peers(); }

// Runs the body here when nothing is queued before it, else behind that. `call` outlives it.
template <typename Body>
std::shared_ptr<Work> ProcessGroupShared::submit(const char *call, bool async_op, Body body) const {
    const auto run = [this, call, body = std::move(body)] {
        try {
            body();
        } catch (const Error &error) {
            const CallSite site{call, options(), this->rank()};
            fail(error.status(), site.text(), ": ", error.what());
        }
    };
    if (async_op) {
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

std::shared_ptr<Work> ProcessGroupShared::AllReduce(const tensor_t &tensor,
                                                    function::ReduceOpType reduce_op,
                                                    bool async_op) const {
    const CallSite site{"AllReduce", options(), rank()};
    site.check_tensor("tensor", tensor);
    site.check_reduction(tensor.dtype(), reduce_op);
    return submit(site.call, async_op, [=] { reduce_pieces(tensor, reduce_op); });
}

void ProcessGroupShared::reduce_pieces(const tensor_t &tensor, function::ReduceOpType op) const {
    Exchange &exchange = this->exchange();
    const CallTag tag = tag_of(Call::kAllReduce, tensor, 0, op);
    const int64_t size = bytes_of(tensor.dtype(), 1);
    const int world = exchange.world();
    Inputs inputs;
    for_pieces(tensor.elements(), Exchange::kPieceBytes / size, [&](int64_t first, int64_t n) {
        std::byte *data = tensor.data() + first * size;
        copy_bytes(exchange.mine(), data, n * size);
        exchange.meet(tag, n * size);
        const bool is_shared = world > 2 && n * size >= kSharedReduction;
        const int64_t begin = is_shared ? n * rank() / world : 0;
        const int64_t end = is_shared ? n * (rank() + 1) / world : n;
        for (int r = 0; r < world; ++r) {
            inputs[size_t(r)] = exchange.of(r) + begin * size;
        }
        if (!is_shared) {
            reduce(data, inputs.data(), world, n, tensor.dtype(), op);
            return;
        }
        reduce(exchange.mine(), inputs.data(), world, end - begin, tensor.dtype(), op);
        exchange.meet(tag, (end - begin) * size);
        for (int r = 0; r < world; ++r) {
            const int64_t from = n * r / world;
            copy_bytes(data + from * size, exchange.of(r), (n * (r + 1) / world - from) * size);
        }
    });
}

std::shared_ptr<Work> ProcessGroupShared::AllGather(const tensor_t &output, const tensor_t &input,
                                                    bool async_op) const {
    const CallSite site{"AllGather", options(), rank()};
    site.check_parts("output", output, "input", input);
    return submit(site.call, async_op, [=] {
        Exchange &exchange = this->exchange();
        const CallTag tag = tag_of(Call::kAllGather, input);
        for_pieces(input.bytes(), Exchange::kPieceBytes, [&](int64_t first, int64_t n) {
            copy_bytes(exchange.mine(), input.data() + first, n);
            exchange.meet(tag, n);
            for (int r = 0; r < exchange.world(); ++r) {
                copy_bytes(output.data() + r * input.bytes() + first, exchange.of(r), n);
            }
        });
    });
}

std::shared_ptr<Work> ProcessGroupShared::ReduceScatter(const tensor_t &output,
                                                        const tensor_t &input,
                                                        function::ReduceOpType reduce_op,
                                                        bool async_op) const {
    const CallSite site{"ReduceScatter", options(), rank()};
    site.check_parts("input", input, "output", output);
    site.check_reduction(input.dtype(), reduce_op);
    return submit(site.call, async_op, [=] {
        Exchange &exchange = this->exchange();
        const CallTag tag = tag_of(Call::kReduceScatter, output, 0, reduce_op);
        const int world = exchange.world();
        const int64_t size = bytes_of(input.dtype(), 1);
        const int64_t most = Exchange::kPieceBytes / (size * world);
        Inputs inputs;
        for_pieces(output.elements(), most, [&](int64_t first, int64_t n) {
            for (int r = 0; r < world; ++r) {
                copy_bytes(exchange.mine() + r * n * size,
                           input.data() + (r * output.elements() + first) * size, n * size);
            }
            exchange.meet(tag, world * n * size);
            for (int r = 0; r < world; ++r) {
                inputs[size_t(r)] = exchange.of(r) + rank() * n * size;
            }
            reduce(output.data() + first * size, inputs.data(), world, n, input.dtype(), reduce_op);
        });
    });
}

std::shared_ptr<Work> ProcessGroupShared::BroadCast(const tensor_t &tensor, int root,
                                                    bool async_op) const {
    const CallSite site{"BroadCast", options(), rank()};
    site.check_tensor("tensor", tensor);
    site.check_rank("root", root);
    return submit(site.call, async_op, [=] {
        Exchange &exchange = this->exchange();
        const CallTag tag = tag_of(Call::kBroadCast, tensor, root);
        for_pieces(tensor.bytes(), Exchange::kPieceBytes, [&](int64_t first, int64_t n) {
            if (rank() == root) {
                copy_bytes(exchange.mine(), tensor.data() + first, n);
            }
            exchange.meet(tag, rank() == root ? n : 0);
            if (rank() != root) {
                copy_bytes(tensor.data() + first, exchange.of(root), n);
            }
        });
    });
}

std::shared_ptr<Work> ProcessGroupShared::Scatter(const tensor_t &output, const tensor_t &input,
                                                  int root, bool async_op) const {
    const CallSite site{"Scatter", options(), rank()};
    site.check_rank("root", root);
    if (rank() == root) {
        site.check_parts("input", input, "output", output);
    } else {
        site.check_tensor("output", output);
    }
    return submit(site.call, async_op, [=] {
        Exchange &exchange = this->exchange();
        const CallTag tag = tag_of(Call::kScatter, output, root);
        const int64_t most = Exchange::kPieceBytes / exchange.world();
        for_pieces(output.bytes(), most, [&](int64_t first, int64_t n) {
            for (int r = 0; r < exchange.world() && rank() == root; ++r) {
                copy_bytes(exchange.mine() + r * n, input.data() + r * output.bytes() + first, n);
            }
            exchange.meet(tag, rank() == root ? exchange.world() * n : 0);
            copy_bytes(output.data() + first, exchange.of(root) + rank() * n, n);
        });
    });
}

std::shared_ptr<Work> ProcessGroupShared::Gather(const tensor_t &output, const tensor_t &input,
                                                 int root, bool async_op) const {
    const CallSite site{"Gather", options(), rank()};
    site.check_rank("root", root);
    if (rank() == root) {
        site.check_parts("output", output, "input", input);
    } else {
        site.check_tensor("input", input);
    }
    return submit(site.call, async_op, [=] {
        Exchange &exchange = this->exchange();
        const CallTag tag = tag_of(Call::kGather, input, root);
        for_pieces(input.bytes(), Exchange::kPieceBytes, [&](int64_t first, int64_t n) {
            copy_bytes(exchange.mine(), input.data() + first, n);
            exchange.meet(tag, n);
            for (int r = 0; r < exchange.world() && rank() == root; ++r) {
                copy_bytes(output.data() + r * input.bytes() + first, exchange.of(r), n);
            }
        });
    });
}

std::shared_ptr<Work> ProcessGroupShared::Send(const tensor_t &tensor, int dest_rank,
                                               bool async_op) const {
    const CallSite site{"Send", options(), rank()};
    site.check_tensor("tensor", tensor);
    site.check_peer("dest_rank", dest_rank);
    return submit(site.call, async_op, [=] {
        const CallTag tag = tag_of(Call::kSend, tensor);
        for_pieces(tensor.bytes(), Exchange::kMailBytes, [&](int64_t first, int64_t n) {
            exchange().put_mail(dest_rank, tag, tensor.data() + first, n);
        });
    });
}

std::shared_ptr<Work> ProcessGroupShared::Recv(const tensor_t &tensor, int src_rank,
                                               bool async_op) const {
    const CallSite site{"Recv", options(), rank()};
    site.check_tensor("tensor", tensor);
    site.check_peer("src_rank", src_rank);
    return submit(site.call, async_op, [=] {
        const CallTag tag = tag_of(Call::kSend, tensor); // what the sender says
        for_pieces(tensor.bytes(), Exchange::kMailBytes, [&](int64_t first, int64_t n) {
            exchange().take_mail(src_rank, tag, tensor.data() + first, n);
        });
    });
}

} // namespace llaisys::parallel
