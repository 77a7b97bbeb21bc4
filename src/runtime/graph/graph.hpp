// Runs a forward inside memory that was planned for it. A plan is made for a size and reused for
// every step that fits; on devices with graph capture the captured graph will live here too.
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
    // Bytes of workspace that a forward of this size takes.
    using Sizer = std::function<int64_t(const GraphParams &)>;

    struct Counters {
        int64_t reserved = 0;  // calls of reserve that had to allocate
        int64_t reused = 0;    // runs inside memory that was there already
        int64_t allocated = 0; // runs that had to allocate first
    };

    GraphRunner(Workspace &workspace, Sizer sizer)
        : workspace_(workspace), sizer_(std::move(sizer)) {}

    // Plans for steps of up to this size.
    void reserve(const GraphParams &params);
    // Whether a step of this size runs without allocation.
    bool can_reuse(const GraphParams &params) const;
    // Grows the plan to this size.
    void alloc(const GraphParams &params);
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
