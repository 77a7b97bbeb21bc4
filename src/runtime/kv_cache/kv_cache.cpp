#include "runtime/kv_cache/kv_cache.hpp"

#include <algorithm>
#include <limits>

namespace llaisys::runtime {

KvCache::KvCache(int32_t n_streams, int32_t cells_per_stream, int64_t max_positions)
    : cells_per_stream_(cells_per_stream), max_positions_(max_positions) {
    require(n_streams >= 1, "number of KV streams must be at least 1, got ", n_streams);
    require(cells_per_stream >= 1, "cells of a KV stream must be at least 1, got ",
            cells_per_stream);
    require(max_positions >= 1, "max_positions must be at least 1, got ", max_positions);
    const int64_t n_slots = int64_t(n_streams) * cells_per_stream;
    require(n_slots <= std::numeric_limits<int32_t>::max(), "KV slots must be at most ",
            std::numeric_limits<int32_t>::max(), ", got ", n_slots);
    streams_.reserve(size_t(n_streams));
    for (int32_t i = 0; i < n_streams; ++i) {
        streams_.emplace_back(cells_per_stream);
    }
    heads_.assign(size_t(n_streams), 0);
}

KvStatus KvCache::set_stream(int64_t seq, int32_t stream) {
    if (seq < 0 || stream < 0 || stream >= n_streams()) {
        return LLAISYS_KV_INVALID_SEQ;
    }
    if (stream == stream_of(seq)) {
        return LLAISYS_KV_OK;
    }
    if (cells_of(seq).holds(seq)) {
        return LLAISYS_KV_INVALID_SEQ;
    }
    if (stream == 0) {
        seq_to_stream_.erase(seq);
    } else {
        seq_to_stream_[seq] = stream;
    }
    return LLAISYS_KV_OK;
}

int32_t KvCache::stream_of(int64_t seq) const {
    if (seq_to_stream_.empty()) {
        return 0;
    }
    const auto found = seq_to_stream_.find(seq);
    return found == seq_to_stream_.end() ? 0 : found->second;
}

int64_t KvCache::used() const {
    int64_t sum = 0;
    for (const KvCells &cells : streams_) {
        sum += cells.used();
    }
    return sum;
}

// -- A step ------------------------------------------------------------------------------------

KvStatus KvCache::check_token(const Ubatch &ubatch, int32_t i, int32_t *stream) const {
    const int32_t begin = ubatch.seq_offsets[i];
    const int32_t end = ubatch.seq_offsets[i + 1];
    if (begin >= end) {
        return LLAISYS_KV_INVALID_SEQ;
    }
    *stream = stream_of(ubatch.seq_ids[begin]);
    for (int32_t s = begin; s < end; ++s) {
        if (ubatch.seq_ids[s] < 0 || stream_of(ubatch.seq_ids[s]) != *stream) {
            return LLAISYS_KV_INVALID_SEQ;
        }
    }
    const int64_t pos = ubatch.positions[i];
    return pos < 0 || pos >= max_positions_ ? LLAISYS_KV_INVALID_POS : LLAISYS_KV_OK;
}

KvStatus KvCache::count_cells(const Ubatch *ubatches, int32_t n,
                              std::vector<SlotPlan> *plans) const {
    for (int32_t u = 0; u < n; ++u) {
        ensure(ubatches[u].n_tokens >= 1, "ubatch ", u, " has ", ubatches[u].n_tokens, " tokens");
        std::vector<int32_t> &n_cells = (*plans)[size_t(u)].n_cells;
        n_cells.assign(streams_.size(), 0);
        for (int32_t i = 0; i < ubatches[u].n_tokens; ++i) {
            int32_t stream = 0;
            const KvStatus status = check_token(ubatches[u], i, &stream);
            if (status != LLAISYS_KV_OK) {
                return status;
            }
            n_cells[size_t(stream)] += 1;
        }
    }
    for (size_t s = 0; s < streams_.size(); ++s) {
        int64_t requested = 0;
        for (const SlotPlan &plan : *plans) {
            requested += plan.n_cells[s];
        }
        if (requested > streams_[s].size() - streams_[s].used()) {
            return LLAISYS_KV_OOM_SLOT;
        }
    }
    return LLAISYS_KV_OK;
}

// Free cells between the head and the cursor are planned already. While not all free cells are
// planned, the next free cell from the cursor on is not one of them.
int32_t KvCache::next_cell(const KvCells &cells, int32_t *cursor) {
    int32_t cell = cells.next_free(*cursor);
    if (cell == cells.size()) {
        cell = cells.next_free(0);
    }
    ensure(cell < cells.size(), "no free cell in a full stream");
    *cursor = cell + 1 == cells.size() ? 0 : cell + 1;
    return cell;
}

KvStatus KvCache::prepare(const Ubatch *ubatches, int32_t n, std::vector<SlotPlan> *plans) const {
    plans->resize(size_t(n));
    const KvStatus status = count_cells(ubatches, n, plans);
    if (status != LLAISYS_KV_OK) {
        return status;
    }
    const std::vector<int32_t> *heads = &heads_;
    int32_t first_token = 0;
    int64_t n_used = used();
    int64_t peak = peak_;
    for (int32_t u = 0; u < n; ++u) {
        const Ubatch &ubatch = ubatches[u];
        SlotPlan &plan = (*plans)[size_t(u)];
        plan.first_token = first_token;
        plan.heads_before = *heads;
        plan.heads_after = *heads;
        plan.used_before = n_used;
        plan.peak_before = peak;
        plan.slots.resize(size_t(ubatch.n_tokens));
        for (int32_t i = 0; i < ubatch.n_tokens; ++i) {
            const int32_t stream = stream_of(ubatch.seq_ids[ubatch.seq_offsets[i]]);
            int32_t *cursor = &plan.heads_after[size_t(stream)];
            plan.slots[size_t(i)] = slot_of(stream, next_cell(streams_[size_t(stream)], cursor));
        }
        heads = &plan.heads_after;
        first_token += ubatch.n_tokens;
        n_used += ubatch.n_tokens;
        peak = std::max(peak, n_used);
    }
    return LLAISYS_KV_OK;
}

KvStatus KvCache::find_slot(int32_t stream, int32_t n, std::vector<int32_t> *slots,
                            int32_t *head) const {
    ensure(stream >= 0 && stream < n_streams() && n >= 0, "find_slot of ", n, " cells in stream ",
           stream, " of ", n_streams());
    const KvCells &cells = streams_[size_t(stream)];
    if (n > cells.size() - cells.used()) {
        return LLAISYS_KV_OOM_SLOT;
    }
    *head = heads_[size_t(stream)];
    for (int32_t i = 0; i < n; ++i) {
        slots->push_back(slot_of(stream, next_cell(cells, head)));
    }
    return LLAISYS_KV_OK;
}

void KvCache::vacate(int32_t slot) {
    streams_[size_t(slot / cells_per_stream_)].vacate(slot % cells_per_stream_);
}

void KvCache::apply_ubatch(const SlotPlan &plan, const Ubatch &ubatch) {
    ensure(plan.slots.size() == size_t(ubatch.n_tokens), "a plan of ", plan.slots.size(),
           " slots for an ubatch of ", ubatch.n_tokens, " tokens");
    ensure(plan.heads_before == heads_ && plan.used_before == used(),
           "the KV cache changed since the plan was made: ", used(), " cells in use, planned with ",
           plan.used_before);
    ensure(plan.first_token == 0 || size_t(plan.first_token) == last_slots_.size(),
           "an ubatch from token ", plan.first_token, " on follows ", last_slots_.size(),
           " tokens");
    std::vector<int32_t> &log = plan.first_token == 0 ? previous_slots_ : last_slots_;
    log.reserve(size_t(plan.first_token) + plan.slots.size());
    const auto occupy = [&](size_t i) {
        const int32_t slot = plan.slots[i];
        const int32_t begin = ubatch.seq_offsets[i];
        streams_[size_t(slot / cells_per_stream_)].occupy(
            slot % cells_per_stream_, ubatch.positions[i], ubatch.seq_ids + begin,
            ubatch.seq_offsets[i + 1] - begin);
    };
    apply_all_or_none(plan.slots.size(), occupy, [&](size_t i) { vacate(plan.slots[i]); });
    heads_ = plan.heads_after;
    peak_ = std::max(peak_, used());
    if (plan.first_token == 0) {
        previous_slots_.swap(last_slots_);
        last_slots_.clear();
    }
    last_slots_.insert(last_slots_.end(), plan.slots.begin(), plan.slots.end());
}

void KvCache::rollback_ubatch(const SlotPlan &plan, const Ubatch &ubatch) {
    ensure(plan.slots.size() == size_t(ubatch.n_tokens), "a plan of ", plan.slots.size(),
           " slots for an ubatch of ", ubatch.n_tokens, " tokens");
    ensure(plan.heads_after == heads_ && plan.used_before + ubatch.n_tokens == used() &&
               size_t(plan.first_token) + plan.slots.size() == last_slots_.size(),
           "the plan to roll back is not the last one applied: ", used(), " cells in use, planned ",
           plan.used_before, " + ", ubatch.n_tokens);
    for (size_t i = 0; i < plan.slots.size(); ++i) {
        const KvCells &cells = streams_[size_t(plan.slots[i] / cells_per_stream_)];
        const int32_t cell = plan.slots[i] % cells_per_stream_;
        ensure(!cells.is_free(cell) && cells.pos(cell) == ubatch.positions[i], "slot ",
               plan.slots[i], " does not hold position ", ubatch.positions[i]);
    }
    std::for_each(plan.slots.rbegin(), plan.slots.rend(), [&](int32_t slot) { vacate(slot); });
    heads_ = plan.heads_before;
    peak_ = plan.peak_before;
    last_slots_.resize(size_t(plan.first_token));
    if (plan.first_token == 0) {
        previous_slots_.swap(last_slots_);
    }
}

bool KvCache::needs_update() const {
    return !copies_.empty() || std::any_of(streams_.begin(), streams_.end(),
                                           [](const KvCells &cells) { return cells.has_shift(); });
}

void KvCache::update(KvUpdate *work) {
    work->copy_src.clear();
    work->copy_dst.clear();
    work->shift_slots.clear();
    work->shift_deltas.clear();
    for (const auto &copy : copies_) {
        const int32_t dst = copy.first;
        if (!streams_[size_t(dst / cells_per_stream_)].is_free(dst % cells_per_stream_)) {
            work->copy_dst.push_back(dst);
        }
    }
    std::sort(work->copy_dst.begin(), work->copy_dst.end());
    for (const int32_t dst : work->copy_dst) {
        work->copy_src.push_back(copies_.at(dst));
    }
    for (int32_t s = 0; s < n_streams(); ++s) {
        const KvCells &cells = streams_[size_t(s)];
        for (int32_t cell = 0; cells.has_shift() && cell < cells.size(); ++cell) {
            if (!cells.is_free(cell) && cells.shift(cell) != 0) {
                work->shift_slots.push_back(slot_of(s, cell));
                work->shift_deltas.push_back(cells.shift(cell));
            }
        }
    }
    copies_.clear();
    for (KvCells &cells : streams_) {
        cells.clear_shifts();
    }
}

// -- Reading -----------------------------------------------------------------------------------

void KvCache::list_slots(const int64_t *seq_ids, int32_t n, std::vector<int32_t> *slots,
                         std::vector<int64_t> *positions) const {
    const KvCells::Entries *list = &listed_;
    int32_t base = 0;
    if (n == 1) {
        list = &cells_of(seq_ids[0]).entries(seq_ids[0]);
        base = slot_of(stream_of(seq_ids[0]), 0);
    } else {
        listed_.clear();
        for (int32_t i = 0; i < n; ++i) {
            const int32_t first = slot_of(stream_of(seq_ids[i]), 0);
            for (const KvCells::Entry &entry : cells_of(seq_ids[i]).entries(seq_ids[i])) {
                listed_.push_back({entry.pos, first + entry.cell});
            }
        }
        std::sort(listed_.begin(), listed_.end(), [](const auto &a, const auto &b) {
            return a.pos != b.pos ? a.pos < b.pos : a.cell < b.cell;
        });
        const auto last =
            std::unique(listed_.begin(), listed_.end(),
                        [](const auto &a, const auto &b) { return a.cell == b.cell; });
        listed_.erase(last, listed_.end());
    }
    slots->resize(list->size());
    for (size_t i = 0; i < list->size(); ++i) {
        (*slots)[i] = base + (*list)[i].cell;
    }
    if (positions != nullptr) {
        positions->resize(list->size());
        for (size_t i = 0; i < list->size(); ++i) {
            (*positions)[i] = (*list)[i].pos;
        }
    }
}

KvCacheStats KvCache::stats() const {
    int64_t n_sequences = 0;
    for (const KvCells &cells : streams_) {
        n_sequences += cells.n_sequences();
    }
    return {int64_t(n_streams()) * cells_per_stream_, used(), peak_, n_sequences};
}

std::string KvCache::dump() const {
    std::ostringstream out;
    for (int32_t s = 0; s < n_streams(); ++s) {
        const KvCells &cells = streams_[size_t(s)];
        for (int32_t cell = 0; cell < cells.size(); ++cell) {
            if (cells.is_free(cell)) {
                continue;
            }
            out << "cell[" << slot_of(s, cell) << "] = {seq_ids=[";
            const SeqSet &set = cells.seqs(cell);
            for (int32_t i = 0; i < set.size(); ++i) {
                out << (i == 0 ? "" : ", ") << set[i];
            }
            out << "], pos=" << cells.pos(cell) << ", used=1}\n";
        }
    }
    for (size_t i = 0; i < last_slots_.size(); ++i) {
        out << "token[" << i << "] -> cell[" << last_slots_[i] << "]\n";
    }
    return out.str();
}

} // namespace llaisys::runtime
