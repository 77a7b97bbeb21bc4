// Steps that a device has recorded: a step of as many rows as one before is replayed as one launch.
//
// Rows are rounded up to a bucket, so that a few graphs serve all steps. The memory that a graph
// touches must stay where it is: a caller says by a version when it has moved, and all graphs go.
//
// Only the first run of a step that is recorded afterwards, and one that a caller names, may try several ways of
// an operator: that is time of the warm-up, which no request pays for.
#pragma once

#include "device/runtime.hpp"

#include <map>

namespace llaisys::runtime {

class CapturedSteps {
public:
    explicit CapturedSteps(const device::Stream &stream) : stream_(stream) { allow_trials(false); }
    ~CapturedSteps() { clear(); }
    CapturedSteps(const CapturedSteps &) = delete;
    CapturedSteps &operator=(const CapturedSteps &) = delete;

    // Rows of the smallest graph that holds so many; 0: this step is not to be captured.
    int64_t bucket_of(int64_t rows) const;

    // Does what body() queues. The first time of a key (a bucket, and its negative for another kind
    // of step) it runs as it is (allocations and choices are made then) and is recorded afterwards
    // for the next times.
    template <typename Body> void run(int64_t key, uint64_t version, const Body &body) {
        if (version != version_) {
            clear();
            version_ = version;
        }
        const auto found = graphs_.find(key);
        if (found != graphs_.end()) {
            stream_.runtime().launch_graph(found->second, stream_.native());
            return;
        }
        run_trying(body);
        stream_.runtime().begin_capture(stream_.native());
        try {
            body();
        } catch (...) {
            abandon();
            throw;
        }
        graphs_[key] = stream_.runtime().end_capture(stream_.native());
    }

    // Does it without recording.
    template <typename Body> void run_trying(const Body &body) {
        allow_trials(true);
        try {
            body();
        } catch (...) {
            allow_trials(false);
            throw;
        }
        allow_trials(false);
    }

    void clear();
    size_t count() const { return graphs_.size(); }

private:
    void allow_trials(bool are_allowed);
    void abandon();

    const device::Stream &stream_;
    std::map<int64_t, void *> graphs_;
    uint64_t version_ = 0;
};

} // namespace llaisys::runtime
