// Batches for a KvCache and its state as text; for KV metadata tests. Include once.
#pragma once

#include "check.hpp"
#include "kv_integrity.hpp"
#include "runtime/kv_cache/kv_cache.hpp"

#include <limits>

namespace kv_test {

using namespace llaisys::runtime;

constexpr int64_t kFar = std::numeric_limits<int64_t>::max();

// Tokens with their sequences; owns the arrays of an Ubatch.
struct Batch {
    std::vector<int64_t> positions, seq_ids;
    std::vector<int32_t> offsets{0};

    Batch &add(int64_t pos, std::vector<int64_t> seqs) {
        positions.push_back(pos);
        seq_ids.insert(seq_ids.end(), seqs.begin(), seqs.end());
        offsets.push_back(int32_t(seq_ids.size()));
        return *this;
    }
    Ubatch view() const {
        return {int32_t(positions.size()), positions.data(), offsets.data(), seq_ids.data()};
    }
};

inline Batch run_of(int64_t seq, int64_t p0, int64_t p1) {
    Batch batch;
    for (int64_t p = p0; p < p1; ++p) {
        batch.add(p, {seq});
    }
    return batch;
}

// prepare + apply of one ubatch.
inline KvStatus put(KvCache &cache, const Batch &batch, std::vector<SlotPlan> *plans = nullptr) {
    std::vector<SlotPlan> own;
    plans = plans == nullptr ? &own : plans;
    const Ubatch ubatch = batch.view();
    const KvStatus status = cache.prepare(&ubatch, 1, plans);
    if (status == LLAISYS_KV_OK) {
        cache.apply_ubatch((*plans)[0], ubatch);
        check_integrity(cache);
    }
    return status;
}

// The visible state of a cache, without pending shifts.
inline std::string state_of(const KvCache &cache) {
    const KvCacheStats stats = cache.stats();
    std::string text = cache.dump() + llaisys::text(stats.capacity, ' ', stats.used, ' ',
                                                    stats.peak, ' ', stats.n_sequences, " heads");
    for (int32_t s = 0; s < cache.n_streams(); ++s) {
        text += llaisys::text(' ', cache.head(s));
    }
    return text;
}

inline std::string listed(const KvCache &cache, std::vector<int64_t> seqs) {
    std::vector<int32_t> slots;
    std::vector<int64_t> positions;
    cache.list_slots(seqs.data(), int32_t(seqs.size()), &slots, &positions);
    std::string text;
    for (size_t i = 0; i < slots.size(); ++i) {
        text += llaisys::text(i == 0 ? "" : " ", positions[i], "@", slots[i]);
    }
    return text;
}

inline std::string joined(const std::vector<int32_t> &values) {
    std::string text;
    for (const int32_t value : values) {
        text += llaisys::text(text.empty() ? "" : " ", value);
    }
    return text;
}

} // namespace kv_test
