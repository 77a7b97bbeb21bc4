// The cells of one stream: position and sequences of each. Metadata only: no tensors, no policy. A
// violated precondition raises an internal error (llaisys::ensure) and changes nothing.
#pragma once

#include "base/check.hpp"

#include <cstdint>
#include <memory>
#include <unordered_map>
#include <vector>

namespace llaisys::runtime {

// Calls apply(i) for i < n. When one throws, calls undo(i) for the earlier ones, last first.
template <typename Apply, typename Undo>
void apply_all_or_none(size_t n, const Apply &apply, const Undo &undo) {
    size_t done = 0;
    try {
        for (; done < n; ++done) {
            apply(done);
        }
    } catch (...) {
        while (done > 0) {
            undo(--done);
        }
        throw;
    }
}

// A sorted set of sequence ids (>= 0). One id costs no allocation.
class SeqSet {
public:
    bool empty() const { return first_ < 0; }
    int32_t size() const { return empty() ? 0 : 1 + (rest_ ? int32_t(rest_->size()) : 0); }
    int64_t operator[](int32_t i) const { return i == 0 ? first_ : (*rest_)[size_t(i - 1)]; }
    bool contains(int64_t seq) const;
    bool insert(int64_t seq); // false: already present
    bool erase(int64_t seq);  // false: not present

private:
    int64_t first_ = -1; // the smallest; -1: the set is empty
    std::unique_ptr<std::vector<int64_t>> rest_;
};

class KvCells {
public:
    // A cell of a sequence. Entries are sorted by (pos, cell); a position may occur in several
    // cells.
    struct Entry {
        int64_t pos;
        int32_t cell;
    };
    using Entries = std::vector<Entry>;

    explicit KvCells(int32_t n_cells);

    int32_t size() const { return int32_t(pos_.size()); }
    int32_t used() const { return used_; }
    int32_t n_sequences() const { return int32_t(sequences_.size()); }

    bool is_free(int32_t cell) const { return seqs_[checked(cell)].empty(); }
    // The first free cell from `from` on (0 <= from <= size()); size() when there is none.
    int32_t next_free(int32_t from) const;

    // Position and pending shift of a cell in use.
    int64_t pos(int32_t cell) const { return pos_[checked_used(cell)]; }
    int64_t shift(int32_t cell) const { return shift_[checked_used(cell)]; }
    const SeqSet &seqs(int32_t cell) const { return seqs_[checked(cell)]; }

    // Empty when the sequence has no cell. Valid until the next change.
    const Entries &entries(int64_t seq) const;
    // [*begin, *end) of entries(seq) are those with positions in [p0, p1).
    void range(int64_t seq, int64_t p0, int64_t p1, size_t *begin, size_t *end) const;
    bool holds(int64_t seq) const { return sequences_.count(seq) != 0; }
    int64_t pos_min(int64_t seq) const; // -1: no cell
    int64_t pos_max(int64_t seq) const;

    // Occupies a free cell for a token at `pos` of the given sequences (n >= 1, ids >= 0,
    // duplicates allowed). `shift`: pending rotation of its keys.
    void occupy(int32_t cell, int64_t pos, const int64_t *seq_ids, int32_t n, int64_t shift = 0);
    // Frees a used cell.
    void vacate(int32_t cell);
    // Adds seq to a used cell.
    void share(int32_t cell, int64_t seq);
    // Removes seq from one of its cells; a cell without sequences becomes free.
    void unshare(int32_t cell, int64_t seq);

    // Removes seq from its cells in [p0, p1); cells without sequences become free.
    void remove(int64_t seq, int64_t p0, int64_t p1);
    // Removes all sequences except seq, which need not have a cell.
    void keep(int64_t seq);
    // Moves the cells of seq in [p0, p1) by delta, for all their sequences. No position may become
    // negative.
    void move(int64_t seq, int64_t p0, int64_t p1, int64_t delta);

    bool has_shift() const { return has_shift_; }
    void clear_shifts();

    // Ids in ascending order.
    std::vector<int64_t> sequence_ids() const;

private:
    size_t checked(int32_t cell) const {
        ensure(cell >= 0 && cell < size(), "cell ", cell, " is outside [0, ", size(), ")");
        return size_t(cell);
    }
    size_t checked_used(int32_t cell) const {
        ensure(!is_free(cell), "cell ", cell, " is free");
        return size_t(cell);
    }
    void mark(int32_t cell, bool in_use);
    void add_entry(int64_t seq, int64_t pos, int32_t cell);
    void drop_entry(int64_t seq, int64_t pos, int32_t cell);
    void leave(int32_t cell, int64_t seq);
    void resort(int64_t seq);

    // [n_cells] each; a cell is in use when its set is not empty.
    std::vector<int64_t> pos_;
    std::vector<int64_t> shift_; // pending rotation of the keys, in positions
    std::vector<SeqSet> seqs_;
    std::vector<uint64_t> used_bits_; // bit c % 64 of word c / 64
    int32_t used_ = 0;
    bool has_shift_ = false;                         // false: every shift is 0
    std::unordered_map<int64_t, Entries> sequences_; // no empty lists
};

} // namespace llaisys::runtime
