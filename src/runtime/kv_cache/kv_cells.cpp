#include "runtime/kv_cache/kv_cells.hpp"

#include <algorithm>
#include <limits>

namespace llaisys::runtime {

namespace {

constexpr int64_t kEnd = std::numeric_limits<int64_t>::max();

bool comes_before(const KvCells::Entry &a, const KvCells::Entry &b) {
    return a.pos != b.pos ? a.pos < b.pos : a.cell < b.cell;
}

bool is_below(const KvCells::Entry &entry, int64_t pos) { return entry.pos < pos; }

} // namespace

bool SeqSet::contains(int64_t seq) const {
    if (seq == first_) {
        return !empty();
    }
    return rest_ && std::binary_search(rest_->begin(), rest_->end(), seq);
}

bool SeqSet::insert(int64_t seq) {
    if (empty()) {
        first_ = seq;
        return true;
    }
    if (contains(seq)) {
        return false;
    }
    if (!rest_) {
        rest_ = std::make_unique<std::vector<int64_t>>();
    }
    const int64_t later = std::max(first_, seq);
    rest_->insert(std::lower_bound(rest_->begin(), rest_->end(), later), later);
    first_ = std::min(first_, seq);
    return true;
}

bool SeqSet::erase(int64_t seq) {
    if (!contains(seq)) {
        return false;
    }
    if (seq != first_) {
        rest_->erase(std::lower_bound(rest_->begin(), rest_->end(), seq));
    } else if (rest_ && !rest_->empty()) {
        first_ = rest_->front();
        rest_->erase(rest_->begin());
    } else {
        first_ = -1;
    }
    return true;
}

KvCells::KvCells(int32_t n_cells) {
    ensure(n_cells >= 1, "a stream of ", n_cells, " cells");
    pos_.assign(size_t(n_cells), -1);
    shift_.assign(size_t(n_cells), 0);
    seqs_.resize(size_t(n_cells));
    used_bits_.assign((size_t(n_cells) + 63) / 64, 0);
}

int32_t KvCells::next_free(int32_t from) const {
    ensure(from >= 0 && from <= size(), "a search from cell ", from, " of ", size());
    size_t word = size_t(from) / 64;
    uint64_t mask = ~uint64_t(0) << (size_t(from) % 64); // in the first word: bits from `from` on
    for (; word < used_bits_.size(); ++word, mask = ~uint64_t(0)) {
        const uint64_t free_bits = ~used_bits_[word] & mask;
        if (free_bits != 0) {
            return std::min(size(), int32_t(word * 64) + __builtin_ctzll(free_bits));
        }
    }
    return size();
}

const KvCells::Entries &KvCells::entries(int64_t seq) const {
    static const Entries none;
    const auto found = sequences_.find(seq);
    return found == sequences_.end() ? none : found->second;
}

void KvCells::range(int64_t seq, int64_t p0, int64_t p1, size_t *begin, size_t *end) const {
    const Entries &list = entries(seq);
    const auto first = std::lower_bound(list.begin(), list.end(), p0, is_below);
    const auto last = p1 == kEnd ? list.end() : std::lower_bound(first, list.end(), p1, is_below);
    *begin = size_t(first - list.begin());
    *end = size_t(last - list.begin());
}

int64_t KvCells::pos_min(int64_t seq) const {
    const Entries &list = entries(seq);
    return list.empty() ? -1 : list.front().pos;
}

int64_t KvCells::pos_max(int64_t seq) const {
    const Entries &list = entries(seq);
    return list.empty() ? -1 : list.back().pos;
}

void KvCells::mark(int32_t cell, bool in_use) {
    const uint64_t bit = uint64_t(1) << (size_t(cell) % 64);
    uint64_t &word = used_bits_[size_t(cell) / 64];
    ensure(((word & bit) != 0) != in_use, "cell ", cell, " is marked twice");
    word ^= bit;
    used_ += in_use ? 1 : -1;
}

void KvCells::add_entry(int64_t seq, int64_t pos, int32_t cell) {
    Entries &list = sequences_[seq];
    const Entry entry{pos, cell};
    try {
        if (list.empty() || comes_before(list.back(), entry)) {
            list.push_back(entry);
        } else {
            list.insert(std::lower_bound(list.begin(), list.end(), entry, comes_before), entry);
        }
    } catch (...) {
        if (list.empty()) {
            sequences_.erase(seq);
        }
        throw;
    }
}

void KvCells::drop_entry(int64_t seq, int64_t pos, int32_t cell) {
    const auto found = sequences_.find(seq);
    ensure(found != sequences_.end(), "sequence ", seq, " of cell ", cell, " has no cell");
    Entries &list = found->second;
    const Entry entry{pos, cell};
    auto it = list.end() - 1;
    if (it->cell != cell || it->pos != pos) {
        it = std::lower_bound(list.begin(), list.end(), entry, comes_before);
        ensure(it != list.end() && it->cell == cell && it->pos == pos, "sequence ", seq,
               " does not list cell ", cell, " at position ", pos);
    }
    list.erase(it);
    if (list.empty()) {
        sequences_.erase(found);
    }
}

void KvCells::leave(int32_t cell, int64_t seq) {
    SeqSet &set = seqs_[size_t(cell)];
    ensure(set.erase(seq), "cell ", cell, " does not hold sequence ", seq);
    if (set.empty()) {
        pos_[size_t(cell)] = -1;
        shift_[size_t(cell)] = 0;
        mark(cell, false);
    }
}

void KvCells::occupy(int32_t cell, int64_t pos, const int64_t *seq_ids, int32_t n, int64_t shift) {
    ensure(is_free(cell), "cell ", cell, " is in use");
    ensure(pos >= 0, "position ", pos, " for cell ", cell);
    ensure(n >= 1, "cell ", cell, " would belong to no sequence");
    for (int32_t i = 0; i < n; ++i) {
        ensure(seq_ids[i] >= 0, "sequence ", seq_ids[i], " for cell ", cell);
    }
    add_entry(seq_ids[0], pos, cell);
    seqs_[size_t(cell)].insert(seq_ids[0]);
    pos_[size_t(cell)] = pos;
    shift_[size_t(cell)] = shift;
    has_shift_ = has_shift_ || shift != 0;
    mark(cell, true);
    try {
        for (int32_t i = 1; i < n; ++i) {
            share(cell, seq_ids[i]);
        }
    } catch (...) {
        vacate(cell);
        throw;
    }
}

void KvCells::vacate(int32_t cell) {
    checked_used(cell);
    while (!is_free(cell)) {
        unshare(cell, seqs_[size_t(cell)][0]);
    }
}

void KvCells::share(int32_t cell, int64_t seq) {
    checked_used(cell);
    ensure(seq >= 0, "sequence ", seq, " for cell ", cell);
    if (seqs_[size_t(cell)].contains(seq)) {
        return;
    }
    add_entry(seq, pos_[size_t(cell)], cell);
    try {
        seqs_[size_t(cell)].insert(seq);
    } catch (...) {
        drop_entry(seq, pos_[size_t(cell)], cell);
        throw;
    }
}

void KvCells::unshare(int32_t cell, int64_t seq) {
    drop_entry(seq, pos_[checked_used(cell)], cell);
    leave(cell, seq);
}

void KvCells::remove(int64_t seq, int64_t p0, int64_t p1) {
    const auto found = sequences_.find(seq);
    if (found == sequences_.end()) {
        return;
    }
    Entries &list = found->second;
    size_t begin, end;
    range(seq, p0, p1, &begin, &end);
    for (size_t i = begin; i < end; ++i) {
        leave(list[i].cell, seq);
    }
    list.erase(list.begin() + int64_t(begin), list.begin() + int64_t(end));
    if (list.empty()) {
        sequences_.erase(found);
    }
}

void KvCells::keep(int64_t seq) {
    for (auto it = sequences_.begin(); it != sequences_.end();) {
        if (it->first == seq) {
            ++it;
            continue;
        }
        for (const Entry &entry : it->second) {
            leave(entry.cell, it->first);
        }
        it = sequences_.erase(it);
    }
}

void KvCells::move(int64_t seq, int64_t p0, int64_t p1, int64_t delta) {
    size_t begin, end;
    range(seq, p0, p1, &begin, &end);
    if (delta == 0 || begin == end) {
        return;
    }
    const Entries &list = entries(seq);
    ensure(list[begin].pos >= 0 && delta >= -list[begin].pos && delta <= kEnd - list[end - 1].pos,
           "positions from ", list[begin].pos, " on cannot move by ", delta);
    std::vector<int64_t> affected; // sorted: the sequences of these cells
    for (size_t i = begin; i < end; ++i) {
        const SeqSet &set = seqs_[size_t(list[i].cell)];
        for (int32_t s = 0; s < set.size(); ++s) {
            const auto it = std::lower_bound(affected.begin(), affected.end(), set[s]);
            if (it == affected.end() || *it != set[s]) {
                affected.insert(it, set[s]);
            }
        }
    }
    for (size_t i = begin; i < end; ++i) {
        pos_[size_t(list[i].cell)] += delta;
        shift_[size_t(list[i].cell)] += delta;
    }
    has_shift_ = true;
    for (const int64_t holder : affected) {
        resort(holder);
    }
}

// Updates and sorts the entries of a sequence after positions changed.
void KvCells::resort(int64_t seq) {
    Entries &list = sequences_.at(seq);
    for (Entry &entry : list) {
        entry.pos = pos_[size_t(entry.cell)];
    }
    if (!std::is_sorted(list.begin(), list.end(), comes_before)) {
        std::sort(list.begin(), list.end(), comes_before);
    }
}

void KvCells::clear_shifts() {
    if (has_shift_) {
        std::fill(shift_.begin(), shift_.end(), 0);
        has_shift_ = false;
    }
}

std::vector<int64_t> KvCells::sequence_ids() const {
    std::vector<int64_t> ids;
    ids.reserve(sequences_.size());
    for (const auto &entry : sequences_) {
        ids.push_back(entry.first);
    }
    std::sort(ids.begin(), ids.end());
    return ids;
}

} // namespace llaisys::runtime
