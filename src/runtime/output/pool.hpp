// One vector a sequence, made of hidden states.
#pragma once

#include "llaisys/runtime/infer_types.h"

#include <cstdint>
#include <unordered_map>
#include <vector>

namespace llaisys::runtime {

class Pool {
public:
    explicit Pool(int64_t size) : size_(size) {}

    // Room for a sequence; nothing if it has some. `take` needs it, and does not allocate.
    void add(int64_t seq_id);
    // The sequence has one more hidden state, f32 [size].
    void take(int64_t seq_id, LlaisysPooling how, const float *hidden);
    // The mean of those, f32 [size]; throws INVALID when there are none, or n is not the size.
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
