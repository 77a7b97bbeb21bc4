// CUDA graph capture and replay of steps.
//
// Rows are padded to a bucket, so that few graphs serve all steps. The caller passes a version of
// the memory that graphs use; a new version discards all graphs.
//
// Operators may autotune only in the run before a capture and in run_autotuning(), both part of the
// warm-up.
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

    // The smallest bucket with at least `rows` rows; 0: the step is not captured.
    int64_t bucket_of(int64_t rows) const;

    // Runs the work of body(). The first call with a key (a bucket, negated for steps with runs of
    // tokens) runs it uncaptured, with allocations and autotuning, then captures it; later calls
    // replay the graph.
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
        run_autotuning(body);
        stream_.runtime().begin_capture(stream_.native());
        try {
            body();
        } catch (...) {
            discard_capture();
            throw;
        }
        graphs_[key] = stream_.runtime().end_capture(stream_.native());
    }

    // Runs body() uncaptured, with autotuning.
    template <typename Body> void run_autotuning(const Body &body) {
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
    void discard_capture();

    const device::Stream &stream_;
    std::map<int64_t, void *> graphs_;
    uint64_t version_ = 0;
};

} // namespace llaisys::runtime
