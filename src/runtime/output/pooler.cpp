#include "runtime/output/pooler.hpp"

#include "base/check.hpp"

namespace llaisys::runtime {

void Pooler::reserve(int64_t seq_id) {
    Entry &entry = entries_[seq_id];
    entry.sum.resize(size_t(size_));
}

void Pooler::add(int64_t seq_id, LlaisysPooling how, const float *hidden) {
    Entry &entry = entries_.at(seq_id);
    const bool replaces = how == LLAISYS_POOLING_LAST || entry.count == 0;
    for (size_t i = 0; i < entry.sum.size(); ++i) {
        entry.sum[i] = (replaces ? 0.0 : entry.sum[i]) + double(hidden[i]);
    }
    entry.count = replaces ? 1 : entry.count + 1;
}

void Pooler::read(int64_t seq_id, float *vector, int64_t n) const {
    require(n == size_, "n must be the hidden size, ", size_, ", got ", n);
    const auto found = entries_.find(seq_id);
    require(found != entries_.end() && found->second.count > 0, "seq_id ", seq_id,
            " has no pooled hidden state");
    const Entry &entry = found->second;
    for (size_t i = 0; i < entry.sum.size(); ++i) {
        vector[i] = float(entry.sum[i] / double(entry.count));
    }
}

} // namespace llaisys::runtime
