// CUDA graph capture and replay of steps.
//
// The caller passes a version of the memory that graphs use; a new version discards all graphs.
//
// Operators may autotune only in the run before a capture and in run_autotuning(), both part of the
// warm-up.
#pragma once

#include "device/runtime.hpp"

#include <map>
#include <tuple>

namespace llaisys::runtime {

class CapturedSteps {
public:
    explicit CapturedSteps(const device::Stream &stream) : stream_(stream) { allow_trials(false); }
    ~CapturedSteps() { clear(); }
    CapturedSteps(const CapturedSteps &) = delete;
    CapturedSteps &operator=(const CapturedSteps &) = delete;

    bool are_supported() const { return stream_.runtime().begin_capture != nullptr; }

    // What the kernels of a step depend on.
    struct Key {
        int64_t rows;   // padded; see graph_rows()
        int64_t n_long; // see AttentionMetadataBuilder::n_long
        bool has_runs;  // a sequence has several tokens
        bool has_lora;  // some row has a LoRA adapter
        bool operator<(const Key &other) const {
            return std::tie(rows, n_long, has_runs, has_lora) <
                   std::tie(other.rows, other.n_long, other.has_runs, other.has_lora);
        }
    };

    // Runs the work of body(). The first call with a key runs it uncaptured, with allocations and
    // autotuning, then captures it; later calls replay the graph.
    template <typename Body> void run(const Key &key, uint64_t version, const Body &body) {
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

    void clear() {
        if (graphs_.empty()) {
            return;
        }
        stream_.synchronize();
        for (const auto &entry : graphs_) {
            stream_.runtime().destroy_graph(entry.second);
        }
        graphs_.clear();
    }
    size_t count() const { return graphs_.size(); }

private:
    void allow_trials(bool are_allowed) {
        if (stream_.runtime().allow_trials != nullptr) {
            stream_.runtime().allow_trials(stream_.native(), are_allowed);
        }
    }
    // Ends and discards a capture after an error.
    void discard_capture() {
        try {
            stream_.runtime().destroy_graph(stream_.runtime().end_capture(stream_.native()));
        } catch (const Error &) { // the error inside the capture is reported
        }
    }

    const device::Stream &stream_;
    std::map<Key, void *> graphs_;
    uint64_t version_ = 0;
};

} // namespace llaisys::runtime
