// Sizes the workspace of a forward: reserved for a size and reused by every step that fits.
#pragma once

#include "runtime/workspace/workspace.hpp"

#include <functional>

namespace llaisys::runtime {

struct GraphParams {
    int64_t n_tokens = 0;
    int64_t n_outputs = 0;
};

class GraphRunner {
public:
    // Workspace bytes of a forward of this size.
    using Sizer = std::function<int64_t(const GraphParams &)>;

    GraphRunner(Workspace &workspace, Sizer sizer)
        : workspace_(workspace), sizer_(std::move(sizer)) {}

    // Reserves memory for steps of up to this size.
    void reserve(const GraphParams &params) { workspace_.reserve(sizer_(params)); }
    // Whether a step of this size runs without allocation.
    bool can_reuse(const GraphParams &params) const {
        return sizer_(params) <= workspace_.capacity();
    }
    // reserve(), then body() with the workspace empty.
    template <typename Body> void run(const GraphParams &params, const Body &body) {
        reserve(params);
        workspace_.begin();
        body();
    }

private:
    Workspace &workspace_;
    Sizer sizer_;
};

} // namespace llaisys::runtime
