#include "runtime/graph/graph.hpp"

namespace llaisys::runtime {

void GraphRunner::reserve(const GraphParams &params) {
    if (!can_reuse(params)) {
        alloc(params);
        ++counters_.reserved;
    }
}

bool GraphRunner::can_reuse(const GraphParams &params) const {
    return sizer_(params) <= workspace_.capacity();
}

void GraphRunner::alloc(const GraphParams &params) { workspace_.reserve(sizer_(params)); }

} // namespace llaisys::runtime
