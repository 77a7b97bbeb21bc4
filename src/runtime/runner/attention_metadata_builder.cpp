#include "runtime/runner/attention_metadata_builder.hpp"

#include <algorithm>
#include <numeric>

namespace llaisys::runtime {

AttentionMetadataBuilder::AttentionMetadataBuilder(const std::vector<int64_t> &windows,
                                                   bool is_bidirectional)
    : is_bidirectional_(is_bidirectional) {
    for (const int64_t window : windows) {
        const auto known = std::find_if(groups_.begin(), groups_.end(),
                                        [&](const Group &group) { return group.window == window; });
        group_of_layer_.push_back(int32_t(known - groups_.begin()));
        if (known == groups_.end()) {
            groups_.push_back({window, {}});
        }
    }
    lists_of_group_.resize(groups_.size());
}

// Index of the cell list of the token's set of sequences; created on first use.
int32_t AttentionMetadataBuilder::list_of(const PreparedStep &step, int32_t token,
                                          const KvCache &cells) {
    const int64_t *ids = step.seq_ids.data() + step.seq_offsets[size_t(token)];
    const int32_t n = step.seq_offsets[size_t(token) + 1] - step.seq_offsets[size_t(token)];
    // Tokens of a sequence are mostly adjacent: search from the newest list.
    for (size_t i = n_lists_; i-- > 0;) {
        const std::vector<int64_t> &known = lists_[i].seq_ids;
        if (int32_t(known.size()) == n && std::equal(known.begin(), known.end(), ids)) {
            return int32_t(i);
        }
    }
    if (n_lists_ == lists_.size()) {
        lists_.emplace_back();
    }
    CellList &list = lists_[n_lists_];
    list.seq_ids.assign(ids, ids + n);
    cells.list_slots(ids, n, &list.slots, &list.positions);
    return int32_t(n_lists_++);
}

void AttentionMetadataBuilder::build_slot(const PreparedStep &step, const UbatchRange &range,
                                          const KvCache &cells, const std::vector<int32_t> &slots) {
    n_lists_ = 0;
    host_rows_.resize(size_t(range.n));
    host_end_.resize(size_t(range.n));
    for (Group &group : groups_) {
        group.host_begin.resize(size_t(range.n));
    }
    for (int32_t i = 0; i < range.n; ++i) {
        const int32_t row = list_of(step, range.first + i, cells);
        const std::vector<int64_t> &positions = lists_[size_t(row)].positions;
        const int64_t position = step.positions[size_t(range.first + i)];
        const auto end = std::upper_bound(positions.begin(), positions.end(), position);
        for (Group &group : groups_) {
            const auto begin =
                group.window > 0 ? std::upper_bound(positions.begin(), end, position - group.window)
                                 : positions.begin();
            group.host_begin[size_t(i)] = int32_t(begin - positions.begin());
        }
        host_rows_[size_t(i)] = row;
        host_end_[size_t(i)] = int32_t(end - positions.begin());
    }
    size_t width = 1;
    for (size_t i = 0; i < n_lists_; ++i) {
        width = std::max(width, lists_[i].slots.size());
    }
    host_tables_.assign(n_lists_ * width, -1);
    for (size_t i = 0; i < n_lists_; ++i) {
        std::copy(lists_[i].slots.begin(), lists_[i].slots.end(),
                  host_tables_.begin() + ptrdiff_t(i * width));
    }
    n_ = range.n;
    slots_ = slots.data();
    tables_ = host_tables_.data();
    n_rows_ = int64_t(n_lists_);
    width_ = int64_t(width);
    block_size_ = 1;
    find_runs();
}

void AttentionMetadataBuilder::build_block(const PreparedStep &step, const UbatchRange &range,
                                           const LlaisysStepInput &input, int32_t block_size,
                                           const std::vector<int32_t> &rows) {
    host_rows_.assign(rows.begin() + range.first, rows.begin() + range.first + range.n);
    host_end_.resize(size_t(range.n));
    for (Group &group : groups_) {
        group.host_begin.resize(size_t(range.n));
    }
    for (int32_t i = 0; i < range.n; ++i) {
        const int64_t position = step.positions[size_t(range.first + i)];
        for (Group &group : groups_) {
            const int64_t first = group.window > 0 ? position + 1 - group.window : 0;
            group.host_begin[size_t(i)] = int32_t(std::max<int64_t>(0, first));
        }
        host_end_[size_t(i)] = int32_t(position + 1);
    }
    n_ = range.n;
    slots_ = input.slot_mapping + range.first;
    tables_ = input.block_tables;
    n_rows_ = input.n_seq;
    width_ = input.block_table_width;
    block_size_ = block_size;
    find_runs();
}

void AttentionMetadataBuilder::find_runs() {
    ops::find_attention_runs(host_rows_.data(), n_, &host_runs_, &host_singles_, &runs_);
    if (is_bidirectional_) {
        widen_runs();
    }
    runs_.n_copied = ops::find_run_extents(host_end_.data(), host_runs_, &host_extents_);
    order_singles();
}

void AttentionMetadataBuilder::widen_runs() {
    for (size_t r = 0; r + 1 < host_runs_.size(); r += 2) {
        const auto first = host_end_.begin() + host_runs_[r];
        std::fill_n(first, host_runs_[r + 1], *(first + host_runs_[r + 1] - 1));
    }
}

void AttentionMetadataBuilder::order_singles() {
    std::sort(host_singles_.begin(), host_singles_.end(), [&](int32_t a, int32_t b) {
        const int32_t end_a = host_end_[size_t(a)];
        const int32_t end_b = host_end_[size_t(b)];
        return end_a != end_b ? end_a > end_b : a < b;
    });
}

int64_t AttentionMetadataBuilder::n_long(int64_t n_padded) const {
    int64_t count = 0;
    for (const int32_t token : host_singles_) { // descending by end
        if (host_end_[size_t(token)] <= ops::kLongSequence) {
            break;
        }
        int32_t begin = host_end_[size_t(token)];
        for (const Group &group : groups_) {
            begin = std::min(begin, group.host_begin[size_t(token)]);
        }
        count += host_end_[size_t(token)] - begin > ops::kLongSequence ? 1 : 0;
    }
    if (count == 0 || count > ops::kMaxLongSequences) {
        return 0;
    }
    int64_t rounded = 1;
    while (rounded < count) {
        rounded *= 2;
    }
    return std::min(rounded, n_padded);
}

void AttentionMetadataBuilder::split_runs() {
    host_runs_.clear();
    host_singles_.resize(size_t(n_));
    std::iota(host_singles_.begin(), host_singles_.end(), 0);
    order_singles();
    runs_ = ops::AttentionRuns();
    runs_.is_known = true;
    runs_.are_all_single = true;
    runs_.n_singles = n_;
}

int64_t AttentionMetadataBuilder::max_bytes(int64_t n_tokens, int64_t n_table_entries) const {
    const auto bytes = [](int64_t n) { return StepArena::bytes_for(n, sizeof(int32_t)); };
    // Runs, their extents and singles: at most three values per token, aligned separately.
    return (6 + int64_t(groups_.size())) * bytes(n_tokens) + bytes(1) + bytes(n_table_entries);
}

models::AttentionMetadata AttentionMetadataBuilder::put(StepArena *arena, int64_t n_padded,
                                                        bool are_settled) {
    ensure(n_padded == n_ || (n_padded > n_ && runs_.are_all_single), n_padded, " rows for ", n_,
           " tokens");
    models::AttentionMetadata metadata;
    metadata.slots = arena->put(slots_, n_, n_padded, -1);
    ops::AttentionLists lists;
    lists.q_rows = arena->put(host_rows_.data(), n_, n_padded);
    lists.end = arena->put(host_end_.data(), n_, n_padded);
    for (size_t g = 0; g < groups_.size(); ++g) {
        lists_of_group_[g].begin = arena->put(groups_[g].host_begin.data(), n_, n_padded);
    }
    lists.runs = runs_;
    lists.runs.n_long = n_long(runs_.are_all_single ? n_padded : runs_.n_singles);
    if (!runs_.are_all_single) {
        lists.runs.runs = arena->put(host_runs_.data(), 2 * runs_.n_runs, 2 * runs_.n_runs);
        if (runs_.n_copied > 0) {
            lists.runs.extents =
                arena->put(host_extents_.data(), 2 * runs_.n_runs, 2 * runs_.n_runs);
        }
    }
    const int64_t n_singles = runs_.are_all_single ? n_padded : runs_.n_singles;
    int32_t *singles = arena->allocate<int32_t>({n_singles}, &lists.runs.singles);
    std::copy(host_singles_.begin(), host_singles_.end(), singles);
    std::iota(singles + runs_.n_singles, singles + n_singles, int32_t(n_)); // padding
    const int32_t width = int32_t(width_);
    lists.width = arena->put(&width, 1, 1);
    const int64_t n_entries = n_table_entries();
    lists.tables = arena->put(tables_, n_entries, n_entries).view({n_rows_, width_});
    lists.block_size = block_size_;
    lists.are_settled = are_settled;
    for (ops::AttentionLists &of_group : lists_of_group_) {
        const Tensor begin = of_group.begin;
        of_group = lists;
        of_group.begin = begin;
    }
    metadata.lists = lists_of_group_.data();
    metadata.list_of_layer = group_of_layer_.data();
    return metadata;
}

} // namespace llaisys::runtime
