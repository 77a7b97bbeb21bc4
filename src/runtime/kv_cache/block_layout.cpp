#include "runtime/kv_cache/block_layout.hpp"

#include "base/check.hpp"

#include <algorithm>

namespace llaisys::runtime {

BlockTables::BlockTables(int32_t block_size, int32_t n_slots, int64_t max_positions)
    : block_size_(block_size), n_slots_(n_slots), max_positions_(max_positions) {
    require(block_size >= 1, "block size must be at least 1, got ", block_size);
    require(n_slots >= block_size && n_slots % block_size == 0,
            "KV slots must be a positive multiple of the block size ", block_size, ", got ",
            n_slots);
    require(max_positions >= 1, "max_positions must be at least 1, got ", max_positions);
    written_.assign(size_t(n_slots), 0);
}

const std::vector<int32_t> &BlockTables::check(const LlaisysStepInput &step) {
    require(step.n_tokens >= 1, "n_tokens must be at least 1, got ", step.n_tokens);
    require(step.n_seq >= 1, "n_seq must be at least 1 in the BLOCK layout, got ", step.n_seq);
    require(step.block_table_width >= 1, "block_table_width must be at least 1, got ",
            step.block_table_width);
    require(step.positions != nullptr, "positions is NULL; the BLOCK layout needs them");
    require(step.slot_mapping != nullptr, "slot_mapping is NULL; the BLOCK layout needs it");
    require(step.context_lens != nullptr, "context_lens is NULL; the BLOCK layout needs it");
    require(step.batch_seq_ids != nullptr, "batch_seq_ids is NULL; the BLOCK layout needs it");
    require(step.block_tables != nullptr, "block_tables is NULL; the BLOCK layout needs it");
    check_rows(step);

    if (++call_ == 0) { // the counter wrapped
        std::fill(written_.begin(), written_.end(), 0);
        call_ = 1;
    }
    rows_.resize(size_t(step.n_tokens));
    int32_t row = 0; // tokens of a sequence are mostly adjacent
    for (int32_t i = 0; i < step.n_tokens; ++i) {
        const int64_t seq_id = step.seq_ids == nullptr ? 0 : step.seq_ids[i];
        if (step.batch_seq_ids[row] != seq_id) {
            row = row_of(seq_id, i);
        }
        check_token(step, i, row);
        rows_[size_t(i)] = row;
    }
    return rows_;
}

void BlockTables::check_rows(const LlaisysStepInput &step) {
    const int64_t row_slots = int64_t(step.block_table_width) * block_size_;
    const int32_t n_blocks = n_slots_ / block_size_;
    row_of_seq_.clear();
    for (int32_t r = 0; r < step.n_seq; ++r) {
        const int64_t seq_id = step.batch_seq_ids[r];
        require(seq_id >= 0, "batch_seq_ids[", r, "] must be at least 0, got ", seq_id);
        row_of_seq_.emplace_back(seq_id, r);

        const int32_t length = step.context_lens[r];
        require(length >= 1 && length <= row_slots, "context_lens[", r, "] must be in [1, ",
                row_slots, "] (block_table_width ", step.block_table_width, " * block size ",
                block_size_, "), got ", length);
        require(length <= max_positions_, "context_lens[", r,
                "] must be at most the longest sequence ", max_positions_, ", got ", length);
        const int32_t *table = step.block_tables + int64_t(r) * step.block_table_width;
        const int32_t needed = (length - 1) / block_size_ + 1;
        for (int32_t b = 0; b < needed; ++b) {
            require(table[b] >= 0 && table[b] < n_blocks, "block_tables[", r, "][", b,
                    "] must be in [0, ", n_blocks, "), got ", table[b]);
        }
    }
    std::sort(row_of_seq_.begin(), row_of_seq_.end());
    for (size_t i = 1; i < row_of_seq_.size(); ++i) {
        require(row_of_seq_[i - 1].first != row_of_seq_[i].first, "batch_seq_ids[",
                row_of_seq_[i].second, "] repeats sequence ", row_of_seq_[i].first, " of row ",
                row_of_seq_[i - 1].second);
    }
}

int32_t BlockTables::row_of(int64_t seq_id, int32_t token) const {
    const auto found = std::lower_bound(row_of_seq_.begin(), row_of_seq_.end(),
                                        std::pair<int64_t, int32_t>(seq_id, 0));
    require(found != row_of_seq_.end() && found->first == seq_id, "seq_ids[", token,
            "] must be one of the ", row_of_seq_.size(), " batch_seq_ids, got ", seq_id);
    return found->second;
}

void BlockTables::check_token(const LlaisysStepInput &step, int32_t i, int32_t row) {
    const int64_t pos = step.positions[i];
    require(pos >= 0 && pos < step.context_lens[row], "positions[", i, "] must be in [0, ",
            step.context_lens[row], ") (context_lens[", row, "]), got ", pos);
    const int32_t block =
        step.block_tables[int64_t(row) * step.block_table_width + pos / block_size_];
    const int32_t expected = block * block_size_ + int32_t(pos % block_size_);
    const int32_t slot = step.slot_mapping[i];
    require(slot >= 0 && slot < n_slots_, "slot_mapping[", i, "] must be in [0, ", n_slots_,
            "), got ", slot);
    require(slot == expected, "slot_mapping[", i, "] must be ", expected, " (block ", block,
            ", position ", pos, "), got ", slot);
    require(written_[size_t(slot)] != call_, "slot_mapping[", i, "] writes slot ", slot,
            " a second time in this step (n_slots ", n_slots_, ")");
    written_[size_t(slot)] = call_;
}

} // namespace llaisys::runtime
