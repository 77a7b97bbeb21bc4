// Fills the arrays of a step from the rows of an engine's sequences.
#include "capi/guard.hpp"
#include "llaisys/models/model.h"

#include <algorithm>
#include <numeric>

namespace llaisys::capi {
namespace {

// The tokens of one sequence.
struct Range {
    int64_t row;
    int64_t start; // position of its first token
    int64_t n_tokens;
    int64_t n_logits;
};

void check(const LlaisysStepBuffers &b) {
    require(b.block_size > 0, "block_size is ", b.block_size);
    require(b.row_tokens && b.row_blocks && b.row_seq_ids && b.row_lora_slots && b.rows &&
                b.starts && b.n_tokens && b.n_logits && b.token_ids && b.positions && b.seq_ids &&
                b.logits && b.lora_slots && b.slot_mapping,
            "an array of buffers is NULL");
}

Range range_at(const LlaisysStepBuffers &b, int32_t i) {
    const Range range{b.rows[i], b.starts[i], b.n_tokens[i], b.n_logits[i]};
    require(range.row >= 0 && range.row < b.n_rows, "row is ", range.row, "; there are ", b.n_rows);
    require(range.start >= 0 && range.start <= b.max_tokens, "start is ", range.start,
            "; a row has ", b.max_tokens, " tokens");
    require(range.n_tokens >= 1 && range.n_tokens <= b.max_tokens - range.start, "n_tokens is ",
            range.n_tokens, " from position ", range.start, " on; a row has ", b.max_tokens);
    require(range.n_logits >= 0 && range.n_logits <= range.n_tokens, "n_logits is ", range.n_logits,
            " of ", range.n_tokens, " tokens");
    return range;
}

// Calls fill(range, index of its first token in the step) for each sequence.
template <typename Fill>
int32_t for_each_range(const LlaisysStepBuffers *buffers, int32_t n_seq, const Fill &fill) {
    return guard([&] {
        const LlaisysStepBuffers &b = sized(buffers, "buffers");
        check(b);
        require(n_seq >= 0 && n_seq <= b.n_rows, "n_seq is ", n_seq, "; there are ", b.n_rows,
                " rows");
        int64_t first = 0;
        for (int32_t i = 0; i < n_seq; ++i) {
            const Range range = range_at(b, i);
            require(range.n_tokens <= b.max_step_tokens - first, "a step has at most ",
                    b.max_step_tokens, " tokens");
            fill(b, range, first);
            first += range.n_tokens;
        }
    });
}

void fill_tokens(const LlaisysStepBuffers &b, const Range &range, int64_t first) {
    const int64_t end = first + range.n_tokens;
    std::copy_n(b.row_tokens + range.row * b.max_tokens + range.start, range.n_tokens,
                b.token_ids + first);
    std::iota(b.positions + first, b.positions + end, range.start);
    std::fill(b.seq_ids + first, b.seq_ids + end, b.row_seq_ids[range.row]);
    std::fill(b.lora_slots + first, b.lora_slots + end, b.row_lora_slots[range.row]);
    std::fill(b.logits + first, b.logits + end - range.n_logits, int8_t(0));
    std::fill(b.logits + end - range.n_logits, b.logits + end, int8_t(1));
}

void fill_slots(const LlaisysStepBuffers &b, const Range &range, int64_t first) {
    const int32_t *blocks = b.row_blocks + range.row * b.max_blocks;
    int32_t *slots = b.slot_mapping + first;
    const int64_t end = range.start + range.n_tokens;
    for (int64_t position = range.start; position < end;) {
        const int64_t index = position / b.block_size;
        require(index < b.max_blocks && blocks[index] >= 0, "position ", position,
                " is outside the blocks of its sequence");
        const int64_t stop = std::min(end, (index + 1) * b.block_size);
        const int64_t offset = int64_t(blocks[index]) * b.block_size - index * b.block_size;
        for (; position < stop; ++position) {
            *slots++ = int32_t(position + offset);
        }
    }
}

} // namespace
} // namespace llaisys::capi

int32_t llaisysFillStepTokens(const LlaisysStepBuffers *buffers, int32_t n_seq) {
    return llaisys::capi::for_each_range(buffers, n_seq, llaisys::capi::fill_tokens);
}

int32_t llaisysFillStepSlots(const LlaisysStepBuffers *buffers, int32_t n_seq) {
    return llaisys::capi::for_each_range(buffers, n_seq, llaisys::capi::fill_slots);
}
