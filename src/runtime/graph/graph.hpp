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

    struct Counters {
        int64_t reserved = 0;  // calls of reserve that allocated
        int64_t reused = 0;    // runs without allocation
        int64_t allocated = 0; // runs that allocated
    };

    GraphRunner(Workspace &workspace, Sizer sizer)
        : workspace_(workspace), sizer_(std::move(sizer)) {}

    // Reserves memory for steps of up to this size.
    void reserve(const GraphParams &params) {
        if (!can_reuse(params)) {
            alloc(params);
            ++counters_.reserved;
        }
    }
    // Whether a step of this size runs without allocation.
    bool can_reuse(const GraphParams &params) const {
        return sizer_(params) <= workspace_.capacity();
    }
    // Grows the workspace to this size.
    void alloc(const GraphParams &params) { workspace_.reserve(sizer_(params)); }
    // alloc() unless can_reuse(), then body() with the workspace empty.
    template <typename Body> void run(const GraphParams &params, const Body &body) {
        if (can_reuse(params)) {
            ++counters_.reused;
        } else {
            alloc(params);
            ++counters_.allocated;
        }
        workspace_.begin();
        body();
    }

    const Counters &counters() const { return counters_; }

private:
    Workspace &workspace_;
    Sizer sizer_;
    Counters counters_;
};

} // namespace llaisys::runtime
