#include "parallel/process_group_peer.hpp"

namespace llaisys::parallel {

using device::Stream;
using function::ReduceOpType;

ProcessGroupPeer::ProcessGroupPeer(const GroupOptions &options)
    : ProcessGroupDevice(options), peers_(options, host()) {
    start_watching();
}

ProcessGroupPeer::~ProcessGroupPeer() { finish(); }

WorkPtr ProcessGroupPeer::all_reduce(const tensor_t &tensor, ReduceOpType op, bool is_async) const {
    return submit("AllReduce", is_async, {tensor}, [&](const Stream &stream) {
        peers_.all_reduce(stream, tensor.data(), tensor.elements(), tensor.dtype(), op);
    });
}

bool ProcessGroupPeer::all_reduce_add(const tensor_t &sum, const tensor_t &terms) const {
    submit("AllReduceAdd", false, {sum, terms}, [&](const Stream &stream) {
        peers_.all_reduce_add(stream, sum.as<float>(), terms.data(), terms.elements(),
                              terms.dtype());
    });
    return true;
}

WorkPtr ProcessGroupPeer::all_gather(const tensor_t &output, const tensor_t &input,
                                     bool is_async) const {
    return submit("AllGather", is_async, {output, input}, [&](const Stream &stream) {
        peers_.exchange(stream, output.data(), input.data(), input.bytes(), -1);
    });
}

// Reduces a copy of the whole input: the engine does not use this call.
WorkPtr ProcessGroupPeer::reduce_scatter(const tensor_t &output, const tensor_t &input,
                                         ReduceOpType op, bool is_async) const {
    const tensor_t sums =
        Tensor::create(input.shape(), input.dtype(), input.device(), input.device_id());
    return submit("ReduceScatter", is_async, {output, input, sums}, [&](const Stream &stream) {
        const auto copy = [&](std::byte *to, const std::byte *from, int64_t bytes) {
            runtime().copy(to, from, size_t(bytes), device::CopyKind::device_to_device,
                           stream.native());
        };
        copy(sums.data(), input.data(), input.bytes());
        peers_.all_reduce(stream, sums.data(), sums.elements(), sums.dtype(), op);
        copy(output.data(), sums.data() + rank() * output.bytes(), output.bytes());
    });
}

WorkPtr ProcessGroupPeer::broadcast(const tensor_t &tensor, int root, bool is_async) const {
    return submit("BroadCast", is_async, {tensor}, [&](const Stream &stream) {
        const bool is_root = rank() == root;
        peers_.exchange(stream, is_root ? nullptr : tensor.data(),
                        is_root ? tensor.data() : nullptr, tensor.bytes(), root);
    });
}

WorkPtr ProcessGroupPeer::scatter(const tensor_t &output, const tensor_t &input, int root,
                                  bool is_async) const {
    return submit("Scatter", is_async, {output, input}, [&](const Stream &stream) {
        const int64_t bytes = output.bytes();
        for (int to = 0; to < size(); ++to) {
            peers_.exchange(stream, rank() == to ? output.data() : nullptr,
                            rank() == root ? input.data() + to * bytes : nullptr, bytes, root);
        }
    });
}

WorkPtr ProcessGroupPeer::gather(const tensor_t &output, const tensor_t &input, int root,
                                 bool is_async) const {
    return submit("Gather", is_async, {output, input}, [&](const Stream &stream) {
        peers_.exchange(stream, rank() == root ? output.data() : nullptr, input.data(),
                        input.bytes(), -1);
    });
}

WorkPtr ProcessGroupPeer::send(const tensor_t &tensor, int dest_rank, bool is_async) const {
    return submit("Send", is_async, {tensor}, [&](const Stream &stream) {
        peers_.send(stream, tensor.data(), tensor.bytes(), dest_rank);
    });
}

WorkPtr ProcessGroupPeer::recv(const tensor_t &tensor, int src_rank, bool is_async) const {
    return submit("Recv", is_async, {tensor}, [&](const Stream &stream) {
        peers_.recv(stream, tensor.data(), tensor.bytes(), src_rank);
    });
}

} // namespace llaisys::parallel
