// The inputs of a forward, which ModelRunner writes into its step arena.
#include "runtime/runner/model_runner.hpp"

#include <algorithm>
#include <numeric>

namespace llaisys::runtime {

// Token ids, positions, token types and pooled rows; output rows and sources; selected output rows;
// LoRA rows and tiles.
int64_t ModelRunner::max_input_bytes(int64_t n, int64_t n_selected, int64_t n_embd) const {
    const auto i32 = [](int64_t count) { return StepArena::bytes_for(count, sizeof(int32_t)); };
    const auto i64 = [](int64_t count) { return StepArena::bytes_for(count, sizeof(int64_t)); };
    const int64_t n_slots = model_.lora_slots();
    const auto lora = [&](int64_t rows) {
        return n_slots == 0 ? 0 : i32(rows) + i32(4 * ops::lora_tiles(rows, n_slots));
    };
    return 4 * i64(n) + 2 * i32(n) + i64(n_selected) + i32(n_selected) + lora(n) +
           lora(n_selected) + StepArena::bytes_for(n_embd, sizeof(float));
}

// Whether only output rows are needed: see models::ModelInput::last_rows.
bool ModelRunner::selects_output_rows(const UbatchRange &range, int64_t n_padded) const {
    return range.n_outputs > 0 && range.n_outputs < range.n && n_padded == range.n &&
           range.n_pooled == 0 && aux_hidden_.row_size() == 0;
}

bool ModelRunner::has_lora(const PreparedStep &step, const UbatchRange &range) const {
    return step.lora_slots != nullptr &&
           std::any_of(step.lora_slots + range.first, step.lora_slots + range.first + range.n,
                       [](int32_t slot) { return slot >= 0; });
}

ops::LoraRows ModelRunner::group_lora() {
    const auto n = int64_t(local_rows_.size());
    const int64_t n_tiles = ops::lora_tiles(n, model_.lora_slots());
    ops::LoraRows lora;
    int32_t *rows = arena_.allocate<int32_t>({n}, &lora.rows);
    int32_t *tiles = arena_.allocate<int32_t>({n_tiles, 4}, &lora.tiles);
    ops::group_lora_rows(local_rows_.data(), n, model_.lora_ranks(), model_.lora_slots(), rows,
                         tiles);
    return lora;
}

// Padding rows are token 0 at position 0.
models::ModelInput ModelRunner::build_input(const PreparedStep &step, const UbatchRange &range,
                                            int64_t n_padded) {
    models::ModelInput input;
    input.n_tokens = n_padded;
    if (step.token_ids != nullptr) {
        input.token_ids = arena_.put(step.token_ids + range.first, range.n, n_padded);
    }
    if (step.embd != nullptr) {
        const int64_t size = step.embd_size;
        float *to = arena_.allocate<float>({n_padded, size}, &input.embeddings);
        std::copy_n(step.embd + range.first * size, range.n * size, to);
    }
    input.positions = arena_.put(step.positions.data() + range.first, range.n, n_padded);
    if (model_.spec().token_types > 0) {
        int64_t *types = arena_.allocate<int64_t>({n_padded}, &input.token_types);
        std::fill_n(types, n_padded, 0);
        if (step.token_types != nullptr) {
            std::copy_n(step.token_types + range.first, range.n, types);
        }
    }
    // The rows of tokens [first, first + n) of a list; returns the end of `to`.
    const auto write_rows = [&](const std::vector<int32_t> &tokens, int32_t first, int32_t n,
                                auto *to) {
        const auto begin = tokens.begin() + first;
        return std::transform(begin, begin + n, to,
                              [&](int32_t token) { return token - range.first; });
    };
    if (range.n_outputs > 0) {
        const int64_t n_outputs = range.n_outputs + (n_padded - range.n);
        int32_t *to = arena_.allocate<int32_t>({n_outputs}, &input.output_rows);
        int32_t *padding = write_rows(step.outputs, range.first_output, range.n_outputs, to);
        std::iota(padding, to + n_outputs, range.n);
    }
    if (selects_output_rows(range, n_padded)) {
        const int32_t n = range.n_outputs;
        write_rows(step.outputs, range.first_output, n,
                   arena_.allocate<int64_t>({n}, &input.last_rows));
        int32_t *indices = arena_.allocate<int32_t>({n}, &input.last_row_indices);
        std::iota(indices, indices + n, 0);
    }
    if (range.n_pooled > 0) {
        write_rows(step.pooled, range.first_pooled, range.n_pooled,
                   arena_.allocate<int64_t>({range.n_pooled}, &input.hidden_rows));
    }
    if (has_lora(step, range)) {
        local_rows_.assign(step.lora_slots + range.first, step.lora_slots + range.first + range.n);
        local_rows_.resize(size_t(n_padded), -1);
        input.lora = group_lora();
        if (selects_output_rows(range, n_padded)) {
            for (int32_t i = 0; i < range.n_outputs; ++i) { // ascending, so in place
                const int32_t row = step.outputs[size_t(range.first_output + i)] - range.first;
                local_rows_[size_t(i)] = local_rows_[size_t(row)];
            }
            local_rows_.resize(size_t(range.n_outputs));
            input.last_lora = group_lora();
        }
    }
    return input;
}

} // namespace llaisys::runtime
