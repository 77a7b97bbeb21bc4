// The seq_* calls of KvCache.
#include "runtime/kv_cache/kv_cache.hpp"

#include <algorithm>
#include <limits>

namespace llaisys::runtime {

namespace {

constexpr int64_t kEnd = std::numeric_limits<int64_t>::max();

} // namespace

KvStatus KvCache::check_range(int64_t seq, int64_t *p0, int64_t *p1) const {
    *p0 = *p0 < 0 ? 0 : *p0;
    *p1 = *p1 < 0 ? kEnd : *p1;
    if (*p0 >= *p1) {
        return LLAISYS_KV_EMPTY_RANGE;
    }
    const KvCells &cells = cells_of(seq);
    if (!cells.holds(seq)) {
        return LLAISYS_KV_INVALID_SEQ;
    }
    size_t begin, end;
    cells.range(seq, *p0, *p1, &begin, &end);
    return begin == end ? LLAISYS_KV_EMPTY_RANGE : LLAISYS_KV_OK;
}

KvStatus KvCache::seq_cp(int64_t dst, int64_t src, int64_t p0, int64_t p1) {
    if (dst < 0 || src < 0) {
        return LLAISYS_KV_INVALID_SEQ;
    }
    const KvStatus status = check_range(src, &p0, &p1);
    if (status != LLAISYS_KV_OK || dst == src) {
        return status;
    }
    if (stream_of(dst) != stream_of(src)) {
        return copy_across(dst, src, p0, p1);
    }
    KvCells &cells = cells_of(src);
    size_t begin, end;
    cells.range(src, p0, p1, &begin, &end);
    std::vector<int32_t> fresh; // copied: share() may reallocate the entries of src
    for (size_t i = begin; i < end; ++i) {
        const int32_t cell = cells.entries(src)[i].cell;
        if (!cells.seqs(cell).contains(dst)) {
            fresh.push_back(cell);
        }
    }
    apply_all_or_none(
        fresh.size(), [&](size_t i) { cells.share(fresh[i], dst); },
        [&](size_t i) { cells.unshare(fresh[i], dst); });
    return LLAISYS_KV_OK;
}

KvStatus KvCache::copy_across(int64_t dst, int64_t src, int64_t p0, int64_t p1) {
    const int32_t src_stream = stream_of(src);
    const int32_t dst_stream = stream_of(dst);
    const KvCells &from = streams_[size_t(src_stream)];
    KvCells &to = streams_[size_t(dst_stream)];
    size_t begin, end;
    from.range(src, p0, p1, &begin, &end);
    std::vector<int32_t> slots;
    int32_t head = 0;
    const KvStatus status = find_slot(dst_stream, int32_t(end - begin), &slots, &head);
    if (status != LLAISYS_KV_OK) {
        return status;
    }
    copies_.reserve(copies_.size() + slots.size());
    const KvCells::Entries &entries = from.entries(src);
    const auto occupy = [&](size_t i) {
        const KvCells::Entry &entry = entries[begin + i];
        to.occupy(slots[i] % cells_per_stream_, entry.pos, &dst, 1, from.shift(entry.cell));
    };
    apply_all_or_none(slots.size(), occupy, [&](size_t i) { vacate(slots[i]); });
    for (size_t i = 0; i < slots.size(); ++i) {
        record_copy(slot_of(src_stream, entries[begin + i].cell), slots[i]);
    }
    heads_[size_t(dst_stream)] = head;
    peak_ = std::max(peak_, used());
    return LLAISYS_KV_OK;
}

// All copies are read before the first is written. A source that is itself a pending target
// therefore resolves to the slot that has its bytes.
void KvCache::record_copy(int32_t src_slot, int32_t dst_slot) {
    const auto pending = copies_.find(src_slot);
    const int32_t origin = pending == copies_.end() ? src_slot : pending->second;
    if (origin == dst_slot) {
        copies_.erase(dst_slot);
    } else {
        copies_[dst_slot] = origin;
    }
}

KvStatus KvCache::seq_rm(int64_t seq, int64_t p0, int64_t p1) {
    if (seq < 0) {
        return LLAISYS_KV_INVALID_SEQ;
    }
    const KvStatus status = check_range(seq, &p0, &p1);
    if (status == LLAISYS_KV_OK) {
        cells_of(seq).remove(seq, p0, p1);
    }
    return status;
}

KvStatus KvCache::seq_add(int64_t seq, int64_t p0, int64_t p1, int64_t delta) {
    if (seq < 0) {
        return LLAISYS_KV_INVALID_SEQ;
    }
    const KvStatus status = check_range(seq, &p0, &p1);
    if (status != LLAISYS_KV_OK) {
        return status;
    }
    KvCells &cells = cells_of(seq);
    size_t begin, end;
    cells.range(seq, p0, p1, &begin, &end);
    const int64_t lowest = cells.entries(seq)[begin].pos;
    const int64_t highest = cells.entries(seq)[end - 1].pos;
    if (delta < -lowest || delta >= max_positions_ - highest) {
        return LLAISYS_KV_INVALID_POS;
    }
    cells.move(seq, p0, p1, delta);
    return LLAISYS_KV_OK;
}

KvStatus KvCache::seq_keep(int64_t seq) {
    if (seq < 0 || !cells_of(seq).holds(seq)) {
        return LLAISYS_KV_INVALID_SEQ;
    }
    for (KvCells &cells : streams_) {
        cells.keep(seq);
    }
    return LLAISYS_KV_OK;
}

int64_t KvCache::seq_pos_min(int64_t seq) const { return cells_of(seq).pos_min(seq); }

int64_t KvCache::seq_pos_max(int64_t seq) const { return cells_of(seq).pos_max(seq); }

} // namespace llaisys::runtime
