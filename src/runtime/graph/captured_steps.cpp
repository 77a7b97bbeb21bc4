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
    // Increments of an eighth to a quarter of the bucket: at most a quarter of the rows is padding.
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

// Ends and discards a capture after an error.
void CapturedSteps::discard_capture() {
    try {
        stream_.runtime().destroy_graph(stream_.runtime().end_capture(stream_.native()));
    } catch (const Error &) {
        // the error inside the capture is reported
    }
}

} // namespace llaisys::runtime
