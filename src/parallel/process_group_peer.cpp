#include "parallel/process_group_peer.hpp"

namespace llaisys::parallel {

ProcessGroupPeer::ProcessGroupPeer(const GroupOptions &options)
    : ProcessGroupDevice(options), peers_(options, host()) {
    start_watching();
}

ProcessGroupPeer::~ProcessGroupPeer() { finish(); }

void ProcessGroupPeer::enqueue(Collective *call, const device::Stream &stream) const {
    const tensor_t &output = call->output;
    const tensor_t &input = call->input;
    const bool is_root = rank() == call->peer;
    const auto copy = [&](std::byte *to, const std::byte *from, int64_t bytes) {
        runtime().copy(to, from, size_t(bytes), device::CopyKind::device_to_device,
                       stream.native());
    };
    const auto reduce = [&](const tensor_t &tensor) {
        peers_.all_reduce(stream, tensor.data(), tensor.elements(), tensor.dtype(), call->op);
    };
    switch (call->type) {
    case OpType::kAllReduce:
        return reduce(output);
    case OpType::kAllReduceAdd:
        return peers_.all_reduce_add(stream, output.as<float>(), input.data(), input.elements(),
                                     input.dtype());
    case OpType::kAllGather:
        return peers_.exchange(stream, output.data(), input.data(), input.bytes(), -1);
    case OpType::kReduceScatter: // reduces a copy of the whole input: the engine does not use it
        call->scratch =
            Tensor::create(input.shape(), input.dtype(), input.device(), input.device_id());
        copy(call->scratch.data(), input.data(), input.bytes());
        reduce(call->scratch);
        return copy(output.data(), call->scratch.data() + rank() * output.bytes(), output.bytes());
    case OpType::kBroadCast:
        return peers_.exchange(stream, is_root ? nullptr : output.data(),
                               is_root ? output.data() : nullptr, output.bytes(), call->peer);
    case OpType::kScatter:
        for (int to = 0; to < size(); ++to) {
            peers_.exchange(stream, rank() == to ? output.data() : nullptr,
                            is_root ? input.data() + to * output.bytes() : nullptr, output.bytes(),
                            call->peer);
        }
        return;
    case OpType::kGather:
        return peers_.exchange(stream, is_root ? output.data() : nullptr, input.data(),
                               input.bytes(), -1);
    case OpType::kSend:
        return peers_.send(stream, output.data(), output.bytes(), call->peer);
    case OpType::kRecv:
        return peers_.recv(stream, output.data(), output.bytes(), call->peer);
    }
}

} // namespace llaisys::parallel
