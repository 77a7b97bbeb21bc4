// Pools hidden states into one embedding per sequence.
#pragma once

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
    void reserve(int64_t seq_id);
    // Adds a hidden state, f32 [size], to a sequence.
    void add(int64_t seq_id, LlaisysPooling how, const float *hidden);
    // The pooled embedding, f32 [size]; throws INVALID when there is none or n is not the size.
    void read(int64_t seq_id, float *vector, int64_t n) const;
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
