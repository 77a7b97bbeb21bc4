#include "parallel/process_group_peer.hpp"

#include "parallel/utils.hpp"

namespace llaisys::parallel {

using device::Stream;
using function::ReduceOpType;

ProcessGroupPeer::ProcessGroupPeer(const GroupOptions &options)
    : ProcessGroupDevice(options), peers_(options, host()) {
    start_watching();
}

ProcessGroupPeer::~ProcessGroupPeer() { finish(); }

std::shared_ptr<Work> ProcessGroupPeer::AllReduce(const tensor_t &tensor, ReduceOpType reduce_op,
                                                  bool async_op) const {
    const CallSite site{"AllReduce", options(), rank()};
    site.check_tensor("tensor", tensor);
    site.check_reduction(tensor.dtype(), reduce_op);
    return submit("AllReduce", async_op, {tensor}, [&](const Stream &stream) {
        peers_.all_reduce(stream, tensor.data(), tensor.elements(), tensor.dtype(), reduce_op);
    });
}

std::shared_ptr<Work> ProcessGroupPeer::AllGather(const tensor_t &output, const tensor_t &input,
                                                  bool async_op) const {
    CallSite{"AllGather", options(), rank()}.check_shards("output", output, "input", input);
    return submit("AllGather", async_op, {output, input}, [&](const Stream &stream) {
        peers_.exchange(stream, output.data(), input.data(), input.bytes(), -1);
    });
}

// Reduces a copy of the whole input: the engine does not use this call.
std::shared_ptr<Work> ProcessGroupPeer::ReduceScatter(const tensor_t &output, const tensor_t &input,
                                                      ReduceOpType reduce_op, bool async_op) const {
    const CallSite site{"ReduceScatter", options(), rank()};
    site.check_shards("input", input, "output", output);
    site.check_reduction(input.dtype(), reduce_op);
    const tensor_t sums =
        Tensor::create(input.shape(), input.dtype(), input.device(), input.device_id());
    return submit("ReduceScatter", async_op, {output, input, sums}, [&](const Stream &stream) {
        const auto copy = [&](std::byte *to, const std::byte *from, int64_t bytes) {
            runtime().copy(to, from, size_t(bytes), device::CopyKind::device_to_device,
                           stream.native());
        };
        copy(sums.data(), input.data(), input.bytes());
        peers_.all_reduce(stream, sums.data(), sums.elements(), sums.dtype(), reduce_op);
        copy(output.data(), sums.data() + rank() * output.bytes(), output.bytes());
    });
}

std::shared_ptr<Work> ProcessGroupPeer::BroadCast(const tensor_t &tensor, int root,
                                                  bool async_op) const {
    const CallSite site{"BroadCast", options(), rank()};
    site.check_tensor("tensor", tensor);
    site.check_rank("root", root);
    return submit("BroadCast", async_op, {tensor}, [&](const Stream &stream) {
        const bool is_root = rank() == root;
        peers_.exchange(stream, is_root ? nullptr : tensor.data(),
                        is_root ? tensor.data() : nullptr, tensor.bytes(), root);
    });
}

std::shared_ptr<Work> ProcessGroupPeer::Scatter(const tensor_t &output, const tensor_t &input,
                                                int root, bool async_op) const {
    const CallSite site{"Scatter", options(), rank()};
    site.check_rank("root", root);
    if (rank() == root) {
        site.check_shards("input", input, "output", output);
    } else {
        site.check_tensor("output", output);
    }
    return submit("Scatter", async_op, {output, input}, [&](const Stream &stream) {
        const int64_t bytes = output.bytes();
        for (int to = 0; to < size(); ++to) {
            peers_.exchange(stream, rank() == to ? output.data() : nullptr,
                            rank() == root ? input.data() + to * bytes : nullptr, bytes, root);
        }
    });
}

std::shared_ptr<Work> ProcessGroupPeer::Gather(const tensor_t &output, const tensor_t &input,
                                               int root, bool async_op) const {
    const CallSite site{"Gather", options(), rank()};
    site.check_rank("root", root);
    if (rank() == root) {
        site.check_shards("output", output, "input", input);
    } else {
        site.check_tensor("input", input);
    }
    return submit("Gather", async_op, {output, input}, [&](const Stream &stream) {
        peers_.exchange(stream, rank() == root ? output.data() : nullptr, input.data(),
                        input.bytes(), -1);
    });
}

std::shared_ptr<Work> ProcessGroupPeer::Send(const tensor_t &tensor, int dest_rank,
                                             bool async_op) const {
    const CallSite site{"Send", options(), rank()};
    site.check_tensor("tensor", tensor);
    site.check_peer("dest_rank", dest_rank);
    return submit("Send", async_op, {tensor}, [&](const Stream &stream) {
        peers_.send(stream, tensor.data(), tensor.bytes(), dest_rank);
    });
}

std::shared_ptr<Work> ProcessGroupPeer::Recv(const tensor_t &tensor, int src_rank,
                                             bool async_op) const {
    const CallSite site{"Recv", options(), rank()};
    site.check_tensor("tensor", tensor);
    site.check_peer("src_rank", src_rank);
    return submit("Recv", async_op, {tensor}, [&](const Stream &stream) {
        peers_.recv(stream, tensor.data(), tensor.bytes(), src_rank);
    });
}

} // namespace llaisys::parallel
