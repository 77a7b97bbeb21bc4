#include "parallel/exchange.hpp"

#include "parallel/reduce.hpp"

#include <iterator>

namespace llaisys::parallel {

Exchange::Exchange(int world, int rank) : world_(world), rank_(rank) {
    require(world >= 1 && world <= kMaxWorld, "a group has 1 to ", kMaxWorld, " ranks, got ",
            world);
    require(rank >= 0 && rank < world, "the rank must be in [0, ", world, "), got ", rank);
}

const char *call_name(Call call) {
    static const char *const names[] = {"AllReduce", "AllGather", "ReduceScatter", "BroadCast",
                                        "Scatter",   "Gather",    "Send",          "Recv"};
    const size_t index = size_t(call);
    return index < std::size(names) ? names[index] : "invalid";
}

bool CallTag::operator==(const CallTag &other) const {
    return call == other.call && dtype == other.dtype && count == other.count &&
           root == other.root && op == other.op;
}

std::string CallTag::text() const {
    const bool reduces = call == Call::kAllReduce || call == Call::kReduceScatter;
    const bool has_root =
        call == Call::kBroadCast || call == Call::kScatter || call == Call::kGather;
    std::string result = llaisys::text(call_name(call), "(");
    result += reduces ? llaisys::text(op_name(op), ", ") : "";
    result += has_root ? llaisys::text("root ", root, ", ") : "";
    return result + llaisys::text(name_of(dtype), ", ", count, " elements)");
}

} // namespace llaisys::parallel
