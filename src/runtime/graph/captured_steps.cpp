#include "runtime/graph/captured_steps.hpp"

namespace llaisys::runtime {

void CapturedSteps::allow_trials(bool are_allowed) {
    if (stream_.runtime().allow_trials != nullptr) {
        stream_.runtime().allow_trials(stream_.native(), are_allowed);
    }
}

void CapturedSteps::clear() {
    if (graphs_.empty()) {
        return;
    }
    stream_.synchronize();
    for (const auto &entry : graphs_) {
        stream_.runtime().destroy_graph(entry.second);
    }
    graphs_.clear();
}

// Ends and discards a capture after an error.
void CapturedSteps::discard_capture() {
    try {
        stream_.runtime().destroy_graph(stream_.runtime().end_capture(stream_.native()));
    } catch (const Error &) {
        // the error inside the capture is reported
    }
}

} // namespace llaisys::runtime
