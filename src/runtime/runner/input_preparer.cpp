#include "runtime/runner/input_preparer.hpp"

#include <algorithm>

namespace llaisys::runtime {

const PreparedStep &InputPreparer::prepare(const LlaisysStepInput &input, const KvCache *cells) {
    require(input.n_tokens >= 1, "n_tokens must be at least 1, got ", input.n_tokens);
    step_.n_tokens = input.n_tokens;
    prepare_tokens(input);
    prepare_sequences(input);
    prepare_positions(input, cells);
    prepare_outputs(input);
    prepare_pooled(input);
    prepare_lora(input);
    prepare_types(input);
    if (spec_.is_bidirectional) {
        check_whole_sequences();
    }
    return step_;
}

void InputPreparer::prepare_tokens(const LlaisysStepInput &input) {
    step_.token_ids = nullptr;
    step_.embd = input.embd;
    const bool is_head = spec_.feature_size > 0;
    if (input.embd != nullptr) {
        step_.embd_size = input.embd_size != 0 ? input.embd_size : spec_.hidden_size;
        require(step_.embd_size == spec_.hidden_size ||
                    (is_head && step_.embd_size == spec_.feature_size),
                "embd_size must be ", spec_.hidden_size,
                is_head ? text(" or ", spec_.feature_size) : std::string(), ", got ",
                step_.embd_size);
    }
    require(!is_head || (input.token_ids != nullptr && input.embd != nullptr),
            "a draft head needs token_ids and embd; one of them is NULL");
    if (input.embd != nullptr && !is_head) {
        return;
    }
    require(input.token_ids != nullptr, "token_ids and embd are both NULL");
    for (int32_t i = 0; i < input.n_tokens; ++i) {
        const int64_t id = input.token_ids[i];
        require(id >= 0 && id < spec_.input_vocabulary, "token_ids[", i, "] must be in [0, ",
                spec_.input_vocabulary, "), got ", id);
    }
    step_.token_ids = input.token_ids;
}

void InputPreparer::prepare_sequences(const LlaisysStepInput &input) {
    const int32_t n = input.n_tokens;
    step_.seq_offsets.resize(size_t(n) + 1);
    step_.seq_offsets[0] = 0;
    for (int32_t i = 0; i < n; ++i) {
        const int32_t count = input.n_seq_id != nullptr ? input.n_seq_id[i] : 1;
        require(count >= 1 && count <= (1 << 20), "n_seq_id[", i, "] must be in [1, ", 1 << 20,
                "], got ", count);
        const int64_t end = int64_t(step_.seq_offsets[size_t(i)]) + count;
        require(end <= INT32_MAX, "n_seq_id adds up to more than ", INT32_MAX);
        step_.seq_offsets[size_t(i) + 1] = int32_t(end);
    }
    const int32_t total = step_.seq_offsets[size_t(n)];
    if (input.seq_ids == nullptr) {
        require(total == n, "seq_ids is NULL but n_seq_id sums to ", total);
        step_.seq_ids.assign(size_t(total), 0);
        return;
    }
    require(input.n_seq_ids == total, "n_seq_ids must be the sum of n_seq_id, ", total, ", got ",
            input.n_seq_ids);
    step_.seq_ids.assign(input.seq_ids, input.seq_ids + total);
    for (int32_t s = 0; s < total; ++s) {
        const int64_t seq = step_.seq_ids[size_t(s)];
        require(seq >= 0, "seq_ids[", s, "] must not be negative, got ", seq);
    }
    if (total == n) {
        return;
    }
    for (int32_t i = 0; i < n; ++i) { // sorted, so that equal sets compare equal
        const auto begin = step_.seq_ids.begin() + step_.seq_offsets[size_t(i)];
        const auto end = step_.seq_ids.begin() + step_.seq_offsets[size_t(i) + 1];
        std::sort(begin, end);
        const auto repeated = std::adjacent_find(begin, end);
        require(repeated == end, "seq_ids of token ", i, " names sequence ",
                repeated == end ? -1 : *repeated, " twice");
    }
}

void InputPreparer::prepare_positions(const LlaisysStepInput &input, const KvCache *cells) {
    require(cells == nullptr || (input.n_seq == 0 && input.slot_mapping == nullptr &&
                                 input.block_tables == nullptr),
            "n_seq must be 0, slot_mapping and block_tables NULL in the SLOT layout");
    require(input.positions != nullptr || cells != nullptr,
            "positions is NULL, which only the SLOT layout allows");
    last_position_.clear();
    step_.positions.resize(size_t(input.n_tokens));
    for (int32_t i = 0; i < input.n_tokens; ++i) {
        int64_t last = -1; // of all sequences of this token
        for (int32_t s = step_.seq_offsets[size_t(i)]; s < step_.seq_offsets[size_t(i) + 1]; ++s) {
            const int64_t seq = step_.seq_ids[size_t(s)];
            const auto known = last_position_.find(seq);
            const int64_t before = known != last_position_.end() ? known->second
                                   : cells != nullptr            ? cells->seq_pos_max(seq)
                                                                 : -1;
            last = std::max(last, before);
        }
        const int64_t position = input.positions != nullptr ? input.positions[i] : last + 1;
        require(position >= 0 && position < max_positions_, "positions[", i, "] must be in [0, ",
                max_positions_, "), got ", position);
        require(position > last, "positions[", i, "] must be above ", last,
                ", the last position of its sequences, got ", position);
        step_.positions[size_t(i)] = position;
        for (int32_t s = step_.seq_offsets[size_t(i)]; s < step_.seq_offsets[size_t(i) + 1]; ++s) {
            last_position_[step_.seq_ids[size_t(s)]] = position;
        }
    }
}

void InputPreparer::prepare_outputs(const LlaisysStepInput &input) {
    step_.outputs.clear();
    if (input.logits == nullptr) {
        step_.outputs.push_back(input.n_tokens - 1);
        return;
    }
    for (int32_t i = 0; i < input.n_tokens; ++i) {
        if (input.logits[i] != 0) {
            step_.outputs.push_back(i);
        }
    }
}

void InputPreparer::prepare_pooled(const LlaisysStepInput &input) {
    step_.pooled.clear();
    step_.pooling = input.pooling;
    for (int32_t i = 0; input.pooling != nullptr && i < input.n_tokens; ++i) {
        const int32_t how = input.pooling[i];
        require(how <= LLAISYS_POOLING_MEAN, "pooling[", i, "] must be in [0, ",
                int(LLAISYS_POOLING_MEAN), "], got ", how);
        if (how == LLAISYS_POOLING_NONE) {
            continue;
        }
        const int32_t count = step_.seq_offsets[size_t(i) + 1] - step_.seq_offsets[size_t(i)];
        require(count == 1, "pooling[", i, "] needs a token of one sequence, it has ", count);
        step_.pooled.push_back(i);
    }
}

void InputPreparer::prepare_lora(const LlaisysStepInput &input) {
    step_.lora_slots = nullptr;
    for (int32_t i = 0; input.lora_slots != nullptr && i < input.n_tokens; ++i) {
        const int32_t slot = input.lora_slots[i];
        require(slot >= -1 && slot < n_lora_slots_, "lora_slots[", i, "] must be in [-1, ",
                n_lora_slots_, "), got ", slot);
        if (slot >= 0) {
            step_.lora_slots = input.lora_slots;
        }
    }
}

void InputPreparer::prepare_types(const LlaisysStepInput &input) {
    step_.token_types = input.token_types;
    const int64_t limit = std::max<int64_t>(1, spec_.token_types);
    for (int32_t i = 0; input.token_types != nullptr && i < input.n_tokens; ++i) {
        require(input.token_types[i] < limit, "token_types[", i, "] must be in [0, ", limit,
                "), got ", int(input.token_types[i]));
    }
}

void InputPreparer::check_whole_sequences() {
    require(step_.seq_offsets.back() == step_.n_tokens,
            "n_seq_id must be 1 for every token of a bidirectional model");
    for (int32_t i = 0; i < step_.n_tokens; ++i) {
        const bool continues = i > 0 && step_.seq_ids[size_t(i)] == step_.seq_ids[size_t(i) - 1];
        const int64_t expected = continues ? step_.positions[size_t(i) - 1] + 1 : 0;
        require(step_.positions[size_t(i)] == expected, "positions[", i, "] must be ", expected,
                ": a step of a bidirectional model has whole sequences of adjacent tokens; got ",
                step_.positions[size_t(i)]);
    }
}

int32_t InputPreparer::end_of_ubatch(const PreparedStep &step, int32_t first) const {
    int32_t end = first + std::min(max_ubatch_, step.n_tokens - first);
    if (!spec_.is_bidirectional || end == step.n_tokens) {
        return end;
    }
    while (end > first && step.positions[size_t(end)] != 0) { // the next one begins a sequence
        --end;
    }
    require(end > first, "a sequence of a bidirectional model has at most ", max_ubatch_,
            " tokens (max_batch_tokens); that of token ", first, " has more");
    return end;
}

const std::vector<UbatchRange> &InputPreparer::split(const PreparedStep &step) {
    ranges_.clear();
    // Counts entries of `tokens` from `*from` on that are below `end`; advances `*from`.
    const auto count_below = [](const std::vector<int32_t> &tokens, int32_t *from, int32_t end) {
        const int32_t first = *from;
        while (size_t(*from) < tokens.size() && tokens[size_t(*from)] < end) {
            ++*from;
        }
        return *from - first;
    };
    int32_t output = 0;
    int32_t pooled = 0;
    for (int32_t first = 0, end = 0; first < step.n_tokens; first = end) {
        UbatchRange range;
        range.first = first;
        end = end_of_ubatch(step, first);
        range.n = end - first;
        range.first_output = output;
        range.first_pooled = pooled;
        range.n_outputs = count_below(step.outputs, &output, end);
        range.n_pooled = count_below(step.pooled, &pooled, end);
        ranges_.push_back(range);
    }
    return ranges_;
}

} // namespace llaisys::runtime
