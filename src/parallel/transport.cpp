#include "parallel/transport.hpp"

#include "parallel/reduce.hpp"

#include <iterator>

namespace llaisys::parallel {

Transport::Transport(int world, int rank) : world_(world), rank_(rank) {
    require(world >= 1 && world <= kMaxWorld, "a group has 1 to ", kMaxWorld, " ranks, got ",
            world);
    require(rank >= 0 && rank < world, "the rank must be in [0, ", world, "), got ", rank);
}

const char *op_type_name(OpType op_type) {
    static const char *const names[] = {"AllReduce",     "AllReduceAdd", "AllGather",
                                        "ReduceScatter", "BroadCast",    "Scatter",
                                        "Gather",        "Send",         "Recv"};
    const size_t index = size_t(op_type);
    return index < std::size(names) ? names[index] : "invalid";
}

bool Fingerprint::operator==(const Fingerprint &other) const {
    return op_type == other.op_type && dtype == other.dtype && count == other.count &&
           root == other.root && op == other.op;
}

std::string Fingerprint::text() const {
    const bool reduces = op_type == OpType::kAllReduce || op_type == OpType::kReduceScatter;
    const bool has_root =
        op_type == OpType::kBroadCast || op_type == OpType::kScatter || op_type == OpType::kGather;
    std::string result = llaisys::text(op_type_name(op_type), "(");
    result += reduces ? llaisys::text(reduce_op_name(op), ", ") : "";
    result += has_root ? llaisys::text("root ", root, ", ") : "";
    return result + llaisys::text(name_of(dtype), ", ", count, " elements)");
}

} // namespace llaisys::parallel
