// Token history of each sequence, for penalties.
#pragma once

#include <cstdint>
#include <unordered_map>
#include <vector>

namespace llaisys::runtime {

class SamplerHistory {
public:
    // A token of the sequence and how often it was sampled (0: in the prompt only).
    struct Entry {
        int32_t token;
        int32_t sampled;
    };
    using Entries = std::vector<Entry>; // sorted by token, distinct

    explicit SamplerHistory(int64_t vocab) : vocab_(vocab) {}

    // Throw INVALID and change nothing for a negative sequence, a negative n, a missing array or a
    // token outside [0, vocab).
    void reset(int64_t seq, const int64_t *prompt, int32_t n);
    void accept(int64_t seq, const int64_t *tokens, int32_t n);
    void forget(int64_t seq);

    // null: the sequence has no history.
    const Entries *find(int64_t seq) const;

private:
    void check(int64_t seq, const char *field, const int64_t *tokens, int32_t n) const;

    int64_t vocab_;
    std::unordered_map<int64_t, Entries> sequences_;
};

} // namespace llaisys::runtime
