// Says where the tokens of a micro-batch write their keys and values and what each of them sees.
// The only place that knows how the two KV layouts differ: both become tables of blocks, the SLOT
// layout with blocks of one.
#pragma once

#include "models/model.hpp"
#include "runtime/kv_cache/block_layout.hpp"
#include "runtime/kv_cache/kv_cache.hpp"
#include "runtime/runner/input_preparer.hpp"

#include <vector>

namespace llaisys::runtime {

// A row of device integers that only grows.
class IntBuffer {
public:
    explicit IntBuffer(const device::Stream &stream) : stream_(stream) {}
    void reserve(int64_t n); // room for n numbers; what it held is lost when it has to grow
    // i32 [n] with these values, in order with the stream; the same memory while the capacity
    // suffices.
    Tensor upload(const int32_t *values, int64_t n);

private:
    const device::Stream &stream_;
    Tensor buffer_;
};

class AttentionMetadataBuilder {
public:
    // windows [n_layers]: the attention window of each layer, 0: none. Layers of one window share
    // their lists.
    AttentionMetadataBuilder(const device::Stream &stream, const std::vector<int64_t> &windows);

    // Room for n tokens and tables of as many entries; without it the first step makes it.
    void reserve(int64_t n_tokens, int64_t n_table_entries);

    // SLOT, after the cells of the micro-batch were taken: one list of cells for each distinct set
    // of sequences among its tokens, sorted by position and cell. slots: [range.n].
    models::AttentionMetadata build_slot(const PreparedStep &step, const UbatchRange &range,
                                         const KvCache &cells, const std::vector<int32_t> &slots);

    // BLOCK: `rows` [step.n_tokens] gives the table row of each token of the step.
    models::AttentionMetadata build_block(const PreparedStep &step, const UbatchRange &range,
                                          const BlockStep &blocks, int32_t block_size,
                                          const std::vector<int32_t> &rows);

private:
    int32_t list_of(const PreparedStep &step, int32_t token, const KvCache &cells);
    models::AttentionMetadata upload(const int32_t *slots, int32_t n, const int32_t *tables,
                                     int64_t n_rows, int64_t width, int32_t block_size);

    // The layers that see through one window.
    struct Group {
        int64_t window;
        IntBuffer begin;
        std::vector<int32_t> host_begin;
    };
    std::vector<Group> groups_;
    std::vector<int32_t> group_of_layer_;
    std::vector<ops::AttentionLists> lists_of_group_; // what the metadata points to
    IntBuffer slots_, q_rows_, end_, tables_;

    // Host scratch, grow-only.
    std::vector<int32_t> host_rows_, host_end_, host_tables_;
    struct CellList {
        std::vector<int64_t> seq_ids; // the set, rising
        std::vector<int32_t> slots;
        std::vector<int64_t> positions;
    };
    std::vector<CellList> lists_; // the first n_lists_ are in use
    size_t n_lists_ = 0;
};

} // namespace llaisys::runtime
