// Metadata of the SLOT layout: cells in streams, allocated one by one and shared by sequences.
//
// A step is: update (the runner moves bytes), prepare (plans without changes), then apply_ubatch
// and forward for each ubatch; after a failure rollback_ubatch in reverse order. Nothing is
// evicted: without a free cell prepare returns OOM_SLOT and changes nothing. KvStorage owns the
// bytes: physical slot = stream * cells_per_stream + cell. Streams are part of the seeds' design
// (000); ModelRunner uses one.
#pragma once

#include "llaisys/runtime/kv_cache.h"
#include "runtime/kv_cache/kv_cells.hpp"

#include <cstdint>
#include <string>
#include <unordered_map>
#include <vector>

namespace llaisys::runtime {

using KvStatus = LlaisysKvStatus;

// Tokens of one forward pass; a view. Token i belongs to seq_ids[seq_offsets[i] .. seq_offsets[i +
// 1]); seq_offsets[0] need not be 0, so that an ubatch can be a view of a batch.
struct Ubatch {
    int32_t n_tokens;
    const int64_t *positions;   // [n_tokens]
    const int32_t *seq_offsets; // [n_tokens + 1], ascending
    const int64_t *seq_ids;
};

// Slots of the tokens of one ubatch. Created by prepare; valid until the cache changes.
struct SlotPlan {
    std::vector<int32_t> slots; // [n_tokens]: physical slot of each token, distinct

    // State before and after the plan, for apply and rollback.
    int32_t first_token = 0;           // tokens of earlier ubatches
    std::vector<int32_t> heads_before; // [n_streams]
    std::vector<int32_t> heads_after;
    std::vector<int32_t> n_cells; // [n_streams]: cells to occupy
    int64_t used_before = 0;
    int64_t peak_before = 0;
};

// Pending work on bytes that the metadata already reflects, due before the next forward: first the
// copies, as if all were read before the first is written (dst distinct), then the shifts: rotate
// the keys of shift_slots[i] by shift_deltas[i] positions.
struct KvUpdate {
    std::vector<int32_t> copy_src, copy_dst;
    std::vector<int32_t> shift_slots;
    std::vector<int64_t> shift_deltas;
};

struct KvCacheStats {
    int64_t capacity;    // all cells
    int64_t used;        // cells in use
    int64_t peak;        // the largest `used` since creation, without steps rolled back
    int64_t n_sequences; // sequences with a cell
};

class KvCache {
public:
    // Positions are in [0, max_positions). Throws INVALID when a number is below 1 or the number of
    // slots exceeds int32.
    KvCache(int32_t n_streams, int32_t cells_per_stream, int64_t max_positions);

    int32_t n_streams() const { return int32_t(streams_.size()); }
    int32_t cells_per_stream() const { return cells_per_stream_; }
    int64_t max_positions() const { return max_positions_; }
    int32_t head(int32_t stream) const { return heads_[size_t(stream)]; }
    const KvCells &cells(int32_t stream) const { return streams_[size_t(stream)]; }

    // The default stream of a sequence is 0. INVALID_SEQ: seq < 0, no such stream, or the sequence
    // has cells in another stream.
    KvStatus set_stream(int64_t seq, int32_t stream);
    int32_t stream_of(int64_t seq) const;

    // -- A step ---------------------------------------------------------------------------------

    // Plans all n ubatches in order, or none (*plans is then undefined). Checks all tokens first,
    // in order: each has a sequence, no id is negative, all its sequences are in one stream (else
    // INVALID_SEQ); its position is in [0, max_positions) (else INVALID_POS). Then OOM_SLOT when a
    // stream has too few free cells. Reuses the memory of *plans.
    KvStatus prepare(const Ubatch *ubatches, int32_t n, std::vector<SlotPlan> *plans) const;

    // Finds n free cells of a stream from its head on, with wrap-around: appends their slots and
    // sets *head to one past the last. OOM_SLOT appends nothing. Does not change the cache.
    KvStatus find_slot(int32_t stream, int32_t n, std::vector<int32_t> *slots, int32_t *head) const;

    // Occupies the planned cells. Plans must be applied in the order of prepare, with no other
    // change in between; otherwise an internal error is raised and nothing changes.
    void apply_ubatch(const SlotPlan &plan, const Ubatch &ubatch);
    // Undoes the last applied plan, including heads, peak and diagnostics.
    void rollback_ubatch(const SlotPlan &plan, const Ubatch &ubatch);

    bool needs_update() const;
    // Moves the pending work on bytes into *work, reusing its memory. Must be called after seq_*
    // calls before the bytes of any slot are written.
    void update(KvUpdate *work);

    // -- Sequences ------------------------------------------------------------------------------
    // Ranges are half open; p0 < 0 means 0 and p1 < 0 means the end. A call that does not return OK
    // changes nothing. The checks, in this order (seq is src in seq_cp):
    //   1. seq < 0 (seq_cp: dst < 0 too)                              INVALID_SEQ
    //   2. p0 >= p1, after replacing negative ones                    EMPTY_RANGE
    //   3. seq has no cell                                            INVALID_SEQ
    //   4. no cell of seq has its position in [p0, p1)                EMPTY_RANGE
    //   5. seq_cp: dst is in another stream, which has fewer free
    //      cells than there are cells to copy                         OOM_SLOT
    //      seq_add: a position would leave [0, max_positions)         INVALID_POS
    // seq_keep has no range: checks 1 and 3.

    // Same stream: adds dst to the cells; dst == src is OK and changes nothing. Another stream:
    // occupies free cells for dst, and the next update copies the bytes. dst keeps its other cells.
    KvStatus seq_cp(int64_t dst, int64_t src, int64_t p0, int64_t p1);
    // A cell without sequences becomes free.
    KvStatus seq_rm(int64_t seq, int64_t p0, int64_t p1);
    // A shared cell moves for all its sequences. The next update rotates the keys.
    KvStatus seq_add(int64_t seq, int64_t p0, int64_t p1, int64_t delta);
    // Removes every other sequence in every stream.
    KvStatus seq_keep(int64_t seq);
    int64_t seq_pos_min(int64_t seq) const; // -1: no cell
    int64_t seq_pos_max(int64_t seq) const;

    // -- Reading --------------------------------------------------------------------------------

    // The cells of any of the n sequences, sorted by (position, slot): a token at position q of
    // this set sees the entries with position <= q. Replaces *slots, and *positions unless null.
    // O(cells) for one sequence; several need a sort.
    void list_slots(const int64_t *seq_ids, int32_t n, std::vector<int32_t> *slots,
                    std::vector<int64_t> *positions) const;

    KvCacheStats stats() const;
    // A line "cell[i] = {seq_ids=[0, 3], pos=7, used=1}" for each slot i in use, then
    // "token[i] -> cell[j]" for the tokens of the last step.
    std::string dump() const;

private:
    int32_t slot_of(int32_t stream, int32_t cell) const {
        return stream * cells_per_stream_ + cell;
    }
    KvCells &cells_of(int64_t seq) { return streams_[size_t(stream_of(seq))]; }
    const KvCells &cells_of(int64_t seq) const { return streams_[size_t(stream_of(seq))]; }
    int64_t used() const;
    // *stream: the stream of the token.
    KvStatus check_token(const Ubatch &ubatch, int32_t i, int32_t *stream) const;
    // Checks 2 to 4 above; replaces negative ends.
    KvStatus check_range(int64_t seq, int64_t *p0, int64_t *p1) const;
    KvStatus copy_across(int64_t dst, int64_t src, int64_t p0, int64_t p1);
    void record_copy(int32_t src_slot, int32_t dst_slot);
    // Next free cell from *cursor on, with wrap-around; one must exist that is not planned yet.
    static int32_t next_cell(const KvCells &cells, int32_t *cursor);
    // Checks every token and counts the cells of each plan.
    KvStatus count_cells(const Ubatch *ubatches, int32_t n, std::vector<SlotPlan> *plans) const;
    void vacate(int32_t slot); // frees the cell

    int32_t cells_per_stream_;
    int64_t max_positions_;
    std::vector<KvCells> streams_;
    std::vector<int32_t> heads_; // [n_streams]: start of the search for a free cell
    std::unordered_map<int64_t, int32_t> seq_to_stream_; // sequences not in stream 0
    std::unordered_map<int32_t, int32_t> copies_;        // pending: dst slot -> src slot
    int64_t peak_ = 0;
    // Slots of the tokens of the last step, and of the previous one for a rollback.
    std::vector<int32_t> last_slots_, previous_slots_;
    mutable std::vector<KvCells::Entry> listed_; // scratch of list_slots; cell = slot
};

} // namespace llaisys::runtime
