#include "runtime/runner/sampler_history.hpp"

#include "base/check.hpp"

#include <algorithm>

namespace llaisys::runtime {

void SamplerHistory::check(int64_t seq, const char *field, const int64_t *tokens, int32_t n) const {
    require(seq >= 0, "seq_id must be at least 0, got ", seq);
    require(n >= 0, "n_", field, " must not be negative, got ", n);
    require(tokens != nullptr || n == 0, field, " is NULL, with ", n, " tokens");
    for (int32_t i = 0; i < n; ++i) {
        require(tokens[i] >= 0 && tokens[i] < vocab_, field, "[", i, "] must be in [0, ", vocab_,
                "), got ", tokens[i]);
    }
}

void SamplerHistory::reset(int64_t seq, const int64_t *prompt, int32_t n) {
    check(seq, "prompt", prompt, n);
    Entries entries;
    entries.reserve(size_t(n));
    for (int32_t i = 0; i < n; ++i) {
        entries.push_back({int32_t(prompt[i]), 0});
    }
    std::sort(entries.begin(), entries.end(),
              [](const Entry &a, const Entry &b) { return a.token < b.token; });
    entries.erase(std::unique(entries.begin(), entries.end(),
                              [](const Entry &a, const Entry &b) { return a.token == b.token; }),
                  entries.end());
    sequences_[seq] = std::move(entries);
}

void SamplerHistory::accept(int64_t seq, const int64_t *tokens, int32_t n) {
    check(seq, "tokens", tokens, n);
    Entries &entries = sequences_[seq];
    const size_t capacity = entries.size() + size_t(n);
    if (entries.capacity() < capacity) { // before the first change
        entries.reserve(std::max(capacity, 2 * entries.capacity()));
    }
    for (int32_t i = 0; i < n; ++i) {
        const int32_t token = int32_t(tokens[i]);
        const auto it =
            std::lower_bound(entries.begin(), entries.end(), token,
                             [](const Entry &entry, int32_t id) { return entry.token < id; });
        if (it != entries.end() && it->token == token) {
            it->sampled += 1;
        } else {
            entries.insert(it, {token, 1});
        }
    }
}

void SamplerHistory::forget(int64_t seq) {
    require(seq >= 0, "seq_id must be at least 0, got ", seq);
    sequences_.erase(seq);
}

const SamplerHistory::Entries *SamplerHistory::find(int64_t seq) const {
    const auto found = sequences_.find(seq);
    return found == sequences_.end() ? nullptr : &found->second;
}

} // namespace llaisys::runtime
