// The metadata of the SLOT layout: cells in streams, handed out one by one, shared by sequences.
//
// A step is: update (the runner moves bytes), prepare (plans, changes nothing), then for each
// ubatch apply_ubatch and forward; after a failure rollback_ubatch, last plan first. Nothing is
// ever evicted: without a free cell the answer is OOM_SLOT and everything stays as it was.
//
// The bytes are somebody else's: physical slot = stream * cells_per_stream + cell.
#pragma once

#include "llaisys/runtime/kv_cache.h"
#include "runtime/kv_cache/kv_cells.hpp"

#include <cstdint>
#include <string>
#include <unordered_map>
#include <vector>

namespace llaisys::runtime {

using KvStatus = LlaisysKvStatus;

// Tokens of one forward pass; a view. Token i belongs to
// seq_ids[seq_offsets[i] .. seq_offsets[i + 1]); seq_offsets[0] need not be 0, so that a piece of a
// batch is a view of it.
struct Ubatch {
    int32_t n_tokens;
    const int64_t *positions;   // [n_tokens]
    const int32_t *seq_offsets; // [n_tokens + 1], rising
    const int64_t *seq_ids;
};

// Where the tokens of one ubatch go. Made by prepare; good for the state it was made in.
struct SlotPlan {
    std::vector<int32_t> slots; // [n_tokens]: physical slot of each token, no two alike

    // The state around the plan, for apply and rollback.
    int32_t first_token = 0;           // tokens of the ubatches planned before it
    std::vector<int32_t> heads_before; // [n_streams]
    std::vector<int32_t> heads_after;
    std::vector<int32_t> taken; // [n_streams]: cells it takes
    int64_t used_before = 0;
    int64_t peak_before = 0;
};

// Work on bytes that the metadata already took for granted, to be done before the next forward:
// first the copies, as if all were read before the first is written (no dst twice), then the
// shifts: the keys of shift_slots[i] are rotated by shift_deltas[i] positions.
struct KvUpdate {
    std::vector<int32_t> copy_src, copy_dst;
    std::vector<int32_t> shift_slots;
    std::vector<int64_t> shift_deltas;
};

struct KvCacheStats {
    int64_t capacity;    // cells in all
    int64_t used;        // cells in use
    int64_t peak;        // the largest `used` since creation (steps rolled back do not count)
    int64_t n_sequences; // sequences that hold a cell
};

class KvCache {
public:
    // Positions are in [0, max_positions). Throws INVALID when a number is below 1 or the slots do
    // not fit in int32.
    KvCache(int32_t n_streams, int32_t cells_per_stream, int64_t max_positions);

    int32_t n_streams() const { return int32_t(streams_.size()); }
    int32_t cells_per_stream() const { return cells_per_stream_; }
    int64_t max_positions() const { return max_positions_; }
    int32_t head(int32_t stream) const { return heads_[size_t(stream)]; }

    // Sequences live in stream 0 unless told otherwise. INVALID_SEQ: seq < 0, no such stream, or
    // the sequence holds cells in another one.
    KvStatus set_stream(int64_t seq, int32_t stream);
    int32_t stream_of(int64_t seq) const;

    // -- A step ---------------------------------------------------------------------------------

    // Plans all n ubatches, one after another, or none (*plans is then of no use). Checks all
    // tokens first, in order, each: it has a sequence, no id is negative, all its sequences live in
    // one stream (else INVALID_SEQ); its position is in [0, max_positions) (else INVALID_POS). Then
    // OOM_SLOT when a stream has not enough free cells. Reuses the memory of *plans.
    KvStatus prepare(const Ubatch *ubatches, int32_t n, std::vector<SlotPlan> *plans) const;

    // The n free cells of a stream from its head on, round the end: appends their slots and sets
    // *head to one past the last of them. OOM_SLOT appends nothing. Changes nothing.
    KvStatus find_slot(int32_t stream, int32_t n, std::vector<int32_t> *slots, int32_t *head) const;

    // Takes the planned cells. Plans are applied in the order in which they were made, with nothing
    // in between but other plans of the same prepare; anything else is an internal error that
    // changes nothing.
    void apply_ubatch(const SlotPlan &plan, const Ubatch &ubatch);
    // Undoes the last apply_ubatch that has not been undone: all is as it was before, the heads,
    // the peak and the diagnostics included.
    void rollback_ubatch(const SlotPlan &plan, const Ubatch &ubatch);

    bool needs_update() const;
    // Hands out the pending work on bytes and forgets it. To be called before the bytes of any slot
    // are written after a seq_* call. Reuses the memory of *work.
    void update(KvUpdate *work);

    // -- Sequences ------------------------------------------------------------------------------
    //
    // Ranges are half open; p0 < 0 means 0 and p1 < 0 means the end. A call that does not return OK
    // has changed nothing. The checks, in this order (seq is src in seq_cp):
    //   1. seq < 0 (seq_cp: dst < 0 too)                              INVALID_SEQ
    //   2. p0 >= p1, after the negative ones were replaced            EMPTY_RANGE
    //   3. seq holds no cell                                          INVALID_SEQ
    //   4. no cell of seq has its position in [p0, p1)                EMPTY_RANGE
    //   5. seq_cp: dst lives in another stream, which has fewer free
    //      cells than there are cells to copy                         OOM_SLOT
    //      seq_add: a position would leave [0, max_positions)         INVALID_POS
    // seq_keep has no range: checks 1 and 3.

    // Same stream: the cells belong to dst as well (those that do already stay as they are);
    // dst == src is OK and changes nothing. Another stream: free cells of it are taken for dst and
    // the bytes are copied by the next update; what dst held before stays.
    KvStatus seq_cp(int64_t dst, int64_t src, int64_t p0, int64_t p1);
    // A cell that no sequence holds any more is free.
    KvStatus seq_rm(int64_t seq, int64_t p0, int64_t p1);
    // A cell that is shared moves for all its sequences. The keys follow with the next update.
    KvStatus seq_add(int64_t seq, int64_t p0, int64_t p1, int64_t delta);
    // Every other sequence, in every stream, leaves all its cells.
    KvStatus seq_keep(int64_t seq);
    int64_t seq_pos_min(int64_t seq) const; // -1: holds no cell
    int64_t seq_pos_max(int64_t seq) const;

    // -- Reading --------------------------------------------------------------------------------

    // The cells that any of the n sequences holds, sorted by (position, slot): a token at q of this
    // set sees the entries with position <= q. Replaces *slots, and *positions when it is not null.
    // O(cells listed) for one sequence; a sort more for several.
    void list_slots(const int64_t *seq_ids, int32_t n, std::vector<int32_t> *slots,
                    std::vector<int64_t> *positions) const;

    KvCacheStats stats() const;
    // "cell[i] = {seq_ids=[0, 3], pos=7, used=1}" a line for each slot i in use, then
    // "token[i] -> cell[j]" for the tokens of the last step.
    std::string dump() const;

    // Raises an internal error with the numbers when the books do not balance. O(cells); for tests
    // and idle moments.
    void check_integrity() const;

private:
    int32_t slot_of(int32_t stream, int32_t cell) const {
        return stream * cells_per_stream_ + cell;
    }
    KvCells &cells_of(int64_t seq) { return streams_[size_t(stream_of(seq))]; }
    const KvCells &cells_of(int64_t seq) const { return streams_[size_t(stream_of(seq))]; }
    int64_t used() const;
    // *stream: where the token lives.
    KvStatus check_token(const Ubatch &ubatch, int32_t i, int32_t *stream) const;
    // Checks 2 to 4 above; replaces negative ends.
    KvStatus check_range(int64_t seq, int64_t *p0, int64_t *p1) const;
    KvStatus copy_across(int64_t dst, int64_t src, int64_t p0, int64_t p1);
    void record_copy(int32_t src_slot, int32_t dst_slot);
    // Next free cell from *cursor on, round the end; there must be one that was not given yet.
    static int32_t take_next(const KvCells &cells, int32_t *cursor);
    // Counts what each plan takes, checking every token.
    KvStatus count_cells(const Ubatch *ubatches, int32_t n, std::vector<SlotPlan> *plans) const;
    // The cells of slots [0, n), last first.
    void vacate(const std::vector<int32_t> &slots, size_t n);

    int32_t cells_per_stream_;
    int64_t max_positions_;
    std::vector<KvCells> streams_;
    std::vector<int32_t> heads_; // [n_streams]: where the search for a free cell begins, < cells
    std::unordered_map<int64_t, int32_t> seq_to_stream_; // those that are not in stream 0
    std::unordered_map<int32_t, int32_t> copies_;        // pending: dst slot -> src slot
    int64_t peak_ = 0;
    // Slots of the tokens of the last step, and of the one before it for a rollback.
    std::vector<int32_t> last_slots_, previous_slots_;
    mutable std::vector<KvCells::Entry> listed_; // scratch of list_slots; cell = slot
};

} // namespace llaisys::runtime
