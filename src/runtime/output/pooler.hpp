// Pools hidden states into one embedding per sequence.
#pragma once

#include "base/check.hpp"
#include "llaisys/runtime/infer_types.h"

#include <cstdint>
#include <unordered_map>
#include <vector>

namespace llaisys::runtime {

class Pooler {
public:
    explicit Pooler(int64_t size) : size_(size) {}

    // Allocates the entry of a sequence if it has none. Required before add(), which does not
    // allocate.
    void reserve(int64_t seq_id) { entries_[seq_id].sum.resize(size_t(size_)); }
    // Adds a hidden state, f32 [size], to a sequence.
    void add(int64_t seq_id, LlaisysPooling how, const float *hidden) {
        Entry &entry = entries_.at(seq_id);
        const bool replaces = how == LLAISYS_POOLING_LAST || entry.count == 0;
        for (size_t i = 0; i < entry.sum.size(); ++i) {
            entry.sum[i] = (replaces ? 0.0 : entry.sum[i]) + double(hidden[i]);
        }
        entry.count = replaces ? 1 : entry.count + 1;
    }
    // The pooled embedding, f32 [size]; throws INVALID when there is none or n is not the size.
    void read(int64_t seq_id, float *vector, int64_t n) const {
        require(n == size_, "n must be the hidden size, ", size_, ", got ", n);
        const auto found = entries_.find(seq_id);
        require(found != entries_.end() && found->second.count > 0, "seq_id ", seq_id,
                " has no pooled hidden state");
        const Entry &entry = found->second;
        for (size_t i = 0; i < entry.sum.size(); ++i) {
            vector[i] = float(entry.sum[i] / double(entry.count));
        }
    }
    void forget(int64_t seq_id) { entries_.erase(seq_id); }

private:
    struct Entry {
        std::vector<double> sum; // [size]
        int64_t count = 0;
    };

    int64_t size_;
    std::unordered_map<int64_t, Entry> entries_;
};

} // namespace llaisys::runtime
