// The BLOCK layout: the caller allocates blocks; this class validates every step against the block
// tables before anything is written. It has no state between steps.
#pragma once

#include "llaisys/runtime/infer_types.h"

#include <cstdint>
#include <utility>
#include <vector>

namespace llaisys::runtime {

class BlockTables {
public:
    // n_slots is a multiple of block_size. Allocates 4 bytes of scratch per slot.
    BlockTables(int32_t block_size, int32_t n_slots, int64_t max_positions);

    int32_t block_size() const { return block_size_; }
    int32_t n_slots() const { return n_slots_; }

    // Throws INVALID with field, index, value and limit unless
    //   n_tokens, n_seq, block_table_width >= 1, no array is missing, and n_seq_id is 1 (checked by
    //   the caller),
    //   batch_seq_ids are >= 0 and distinct,
    //   1 <= context_lens[r] <= block_table_width * block_size, <= max_positions,
    //   block_tables[r][b] is in [0, n_slots / block_size) for every block b that context_lens[r]
    //   needs (later entries are not read),
    //   seq_ids[i] is one of batch_seq_ids, 0 <= positions[i] < its context_lens,
    //   slot_mapping[i] == table[pos / block_size] * block_size + pos % block_size,
    //   no slot is written twice.
    // Returns [n_tokens]: the row of the tables of each token; valid until the next call.
    const std::vector<int32_t> &check(const LlaisysStepInput &step);

private:
    void check_rows(const LlaisysStepInput &step);
    int32_t row_of(int64_t seq_id, int32_t token) const;
    void check_token(const LlaisysStepInput &step, int32_t i, int32_t row);

    int32_t block_size_;
    int32_t n_slots_;
    int64_t max_positions_;
    // Grow-only scratch.
    std::vector<std::pair<int64_t, int32_t>> row_of_seq_; // (sequence, row), sorted
    std::vector<int32_t> rows_;
    std::vector<uint32_t> written_; // [n_slots]: the call that wrote it last
    uint32_t call_ = 0;
};

} // namespace llaisys::runtime
