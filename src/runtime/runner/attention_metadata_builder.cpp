#include "runtime/runner/attention_metadata_builder.hpp"

#include <algorithm>

namespace llaisys::runtime {

void IntBuffer::reserve(int64_t n) {
    if (!buffer_.defined() || buffer_.size(0) < n) {
        const int64_t capacity = std::max<int64_t>(n, buffer_.defined() ? buffer_.size(0) * 2 : 64);
        buffer_ =
            Tensor::create({capacity}, LLAISYS_DTYPE_I32, stream_.type(), stream_.device_id());
    }
}

Tensor IntBuffer::upload(const int32_t *values, int64_t n) {
    reserve(n);
    Tensor view = buffer_.slice(0, 0, n);
    view.load(stream_, values, size_t(n) * sizeof(int32_t));
    return view;
}

AttentionMetadataBuilder::AttentionMetadataBuilder(const device::Stream &stream,
                                                   const std::vector<int64_t> &windows)
    : slots_(stream), q_rows_(stream), end_(stream), tables_(stream) {
    for (const int64_t window : windows) {
        const auto known = std::find_if(groups_.begin(), groups_.end(),
                                        [&](const Group &group) { return group.window == window; });
        group_of_layer_.push_back(int32_t(known - groups_.begin()));
        if (known == groups_.end()) {
            groups_.push_back({window, IntBuffer(stream), {}});
        }
    }
    lists_of_group_.resize(groups_.size());
}

void AttentionMetadataBuilder::reserve(int64_t n_tokens, int64_t n_table_entries) {
    for (IntBuffer *buffer : {&slots_, &q_rows_, &end_}) {
        buffer->reserve(n_tokens);
    }
    for (Group &group : groups_) {
        group.begin.reserve(n_tokens);
    }
    tables_.reserve(n_table_entries);
}

// Index of the list of the token's set of sequences; made when it is the first of its kind.
int32_t AttentionMetadataBuilder::list_of(const PreparedStep &step, int32_t token,
                                          const KvCache &cells) {
    const int64_t *ids = step.seq_ids.data() + step.seq_offsets[size_t(token)];
    const int32_t n = step.seq_offsets[size_t(token) + 1] - step.seq_offsets[size_t(token)];
    // The tokens of a sequence mostly stand together: look at the newest list first.
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

models::AttentionMetadata AttentionMetadataBuilder::build_slot(const PreparedStep &step,
                                                               const UbatchRange &range,
                                                               const KvCache &cells,
                                                               const std::vector<int32_t> &slots) {
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
    return upload(slots.data(), range.n, host_tables_.data(), int64_t(n_lists_), int64_t(width), 1);
}

models::AttentionMetadata AttentionMetadataBuilder::build_block(const PreparedStep &step,
                                                                const UbatchRange &range,
                                                                const BlockStep &blocks,
                                                                int32_t block_size,
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
    return upload(blocks.slot_mapping + range.first, range.n, blocks.block_tables, blocks.n_seq,
                  blocks.width, block_size);
}

models::AttentionMetadata AttentionMetadataBuilder::upload(const int32_t *slots, int32_t n,
                                                           const int32_t *tables, int64_t n_rows,
                                                           int64_t width, int32_t block_size) {
    models::AttentionMetadata metadata;
    metadata.slots = slots_.upload(slots, n);
    ops::AttentionLists lists;
    lists.q_rows = q_rows_.upload(host_rows_.data(), n);
    lists.end = end_.upload(host_end_.data(), n);
    lists.tables = tables_.upload(tables, n_rows * width).view({n_rows, width});
    lists.block_size = block_size;
    for (size_t g = 0; g < groups_.size(); ++g) {
        lists_of_group_[g] = lists;
        lists_of_group_[g].begin = groups_[g].begin.upload(groups_[g].host_begin.data(), n);
    }
    metadata.lists = lists_of_group_.data();
    metadata.list_of_layer = group_of_layer_.data();
    return metadata;
}

} // namespace llaisys::runtime
