#include "runtime/graph/captured_steps.hpp"

namespace llaisys::runtime {

namespace {

constexpr int64_t kMostRows = 512;

} // namespace

int64_t CapturedSteps::bucket_of(int64_t rows) const {
    if (stream_.runtime().begin_capture == nullptr || rows > kMostRows) {
        return 0;
    }
    int64_t bucket = 1;
    while (bucket < rows && bucket < 8) {
        bucket *= 2;
    }
    // Steps of an eighth to a quarter of the size: at most a quarter of the rows is for nothing.
    for (int64_t step = 8; bucket < rows; bucket += step) {
        while (bucket >= 8 * step) {
            step *= 2;
        }
    }
    return bucket;
}

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

// Ends a recording that failed; what it was is of no use.
void CapturedSteps::abandon() {
    try {
        stream_.runtime().destroy_graph(stream_.runtime().end_capture(stream_.native()));
    } catch (const Error &) {
        // the failure inside the recording is what counts
    }
}

} // namespace llaisys::runtime
