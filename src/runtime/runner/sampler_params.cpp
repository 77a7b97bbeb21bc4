#include "runtime/runner/sampler_params.hpp"

#include "base/check.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <string>

namespace llaisys::runtime {

namespace {

// Whether the value, converted to float or int32, is within the limits.
bool is_within(const NumberField &field, double value) {
    const double largest = field.real != nullptr ? double(std::numeric_limits<float>::max())
                                                 : double(std::numeric_limits<int32_t>::max());
    if (!(std::fabs(value) <= largest) ||
        (field.integer != nullptr && value != std::trunc(value))) {
        return false;
    }
    const double stored = field.real != nullptr ? double(float(value)) : value;
    const Limits &limits = field.limits;
    return stored <= limits.high && (limits.above_low ? stored > limits.low : stored >= limits.low);
}

std::string rule_of(const NumberField &field) {
    const Limits &limits = field.limits;
    const char *kind = field.integer != nullptr ? "an integer " : "finite and ";
    if (std::isfinite(limits.high)) {
        return text("in ", limits.above_low ? "(" : "[", limits.low, ", ", limits.high, "]");
    }
    if (std::isfinite(limits.low)) {
        return text(kind, limits.above_low ? "above " : "at least ", limits.low);
    }
    return "finite";
}

const NumberField &field_of(const char *name, int32_t i) {
    for (const NumberField &field : kNumberFields) {
        if (std::strcmp(field.name, name) == 0) {
            return field;
        }
    }
    std::string known;
    for (const NumberField &field : kNumberFields) {
        known += text(known.empty() ? "" : ", ", field.name);
    }
    fail(LLAISYS_ERROR_INVALID, "numbers[", i, "].name must be one of ", known, ", got ",
         std::string(name).substr(0, 64));
}

template <typename T> void check_natural(const char *field, const T *values, int32_t n) {
    for (int32_t r = 0; values != nullptr && r < n; ++r) {
        require(values[r] >= 0, field, "[", r, "] must be at least 0, got ", values[r]);
    }
}

void check_offsets(const char *field, const int32_t *offsets, int32_t n) {
    require(offsets[0] == 0, field, "[0] must be 0, got ", offsets[0]);
    for (int32_t r = 0; r < n; ++r) {
        require(offsets[r + 1] >= offsets[r], field, "[", r + 1, "] must be at least ", offsets[r],
                ", got ", offsets[r + 1]);
    }
}

void check_chain(const LlaisysSamplingMetadata &s) {
    if (s.chain_offsets == nullptr) {
        return;
    }
    check_offsets("chain_offsets", s.chain_offsets, s.n_rows);
    require(s.chain != nullptr || s.chain_offsets[s.n_rows] == 0, "chain is NULL, with ",
            s.chain_offsets[s.n_rows], " processors");
    for (int32_t r = 0; r < s.n_rows; ++r) {
        const int32_t begin = s.chain_offsets[r];
        const int32_t end = s.chain_offsets[r + 1];
        require(end - begin <= LLAISYS_SAMPLER_COUNT, "the chain of row ", r, " must have at most ",
                int(LLAISYS_SAMPLER_COUNT), " processors, got ", end - begin);
        uint32_t seen = 0;
        for (int32_t i = begin; i < end; ++i) {
            const int kind = s.chain[i];
            require(kind < LLAISYS_SAMPLER_COUNT, "chain[", i, "] of row ", r, " must be in [0, ",
                    int(LLAISYS_SAMPLER_COUNT), "), got ", kind);
            require((seen >> kind & 1u) == 0, "chain[", i, "] of row ", r, " repeats kind ", kind);
            seen |= 1u << kind;
        }
    }
}

void check_bias(const LlaisysSamplingMetadata &s, int64_t vocab) {
    if (s.bias_offsets == nullptr) {
        return;
    }
    check_offsets("bias_offsets", s.bias_offsets, s.n_rows);
    const int32_t n = s.bias_offsets[s.n_rows];
    require((s.bias_ids != nullptr && s.bias_values != nullptr) || n == 0,
            s.bias_ids == nullptr ? "bias_ids" : "bias_values", " is NULL, with ", n, " biases");
    for (int32_t r = 0; r < s.n_rows; ++r) {
        for (int32_t i = s.bias_offsets[r]; i < s.bias_offsets[r + 1]; ++i) {
            require(s.bias_ids[i] >= 0 && s.bias_ids[i] < vocab, "bias_ids[", i, "] of row ", r,
                    " must be in [0, ", vocab, "), got ", s.bias_ids[i]);
            const float value = s.bias_values[i];
            require(std::isfinite(value) || (std::isinf(value) && value < 0), "bias_values[", i,
                    "] of row ", r, " must be finite or -inf, got ", value);
        }
    }
}

void check_masks(const LlaisysSamplingMetadata &s) {
    require(s.n_masks >= 0, "n_masks must be at least 0, got ", s.n_masks);
    for (int32_t r = 0; s.mask_rows != nullptr && r < s.n_rows; ++r) {
        require(s.mask_rows[r] >= -1 && s.mask_rows[r] < s.n_masks, "mask_rows[", r,
                "] must be in [-1, ", s.n_masks, "), got ", s.mask_rows[r]);
        require(s.mask_rows[r] < 0 || s.masks != nullptr, "masks is NULL, but mask_rows[", r,
                "] is ", s.mask_rows[r]);
    }
}

} // namespace

NumberColumns::NumberColumns(const LlaisysSamplingMetadata &s) {
    require(s.n_numbers >= 0, "n_numbers must be at least 0, got ", s.n_numbers);
    require(s.numbers != nullptr || s.n_numbers == 0, "numbers is NULL, with ", s.n_numbers,
            " entries");
    for (int32_t i = 0; i < s.n_numbers; ++i) {
        const LlaisysSamplingNumber &number = s.numbers[i];
        require(number.name != nullptr, "numbers[", i, "].name is NULL");
        const NumberField &field = field_of(number.name, i);
        const double *&values = values_[size_t(&field - kNumberFields)];
        require(values == nullptr, "numbers[", i, "].name repeats ", field.name);
        require(number.values != nullptr || s.n_rows == 0, "numbers[", i, "].values, of ",
                field.name, ", is NULL");
        values = number.values;
        for (int32_t r = 0; r < s.n_rows; ++r) {
            if (!is_within(field, values[r])) {
                fail(LLAISYS_ERROR_INVALID, field.name, "[", r, "] must be ", rule_of(field),
                     ", got ", values[r]);
            }
        }
    }
}

RowNumbers NumberColumns::row(int32_t r) const {
    RowNumbers numbers;
    for (size_t f = 0; f < values_.size(); ++f) {
        if (values_[f] != nullptr) {
            kNumberFields[f].set(&numbers, values_[f][r]);
        }
    }
    return numbers;
}

void check_output_rows(const LlaisysSamplingMetadata &s, int32_t n_outputs) {
    if (s.rows == nullptr) {
        require(s.n_rows <= n_outputs, "n_rows must be at most the number of output rows ",
                n_outputs, " when rows is NULL, got ", s.n_rows);
        return;
    }
    for (int32_t r = 0; r < s.n_rows; ++r) {
        require(s.rows[r] >= 0 && s.rows[r] < n_outputs, "rows[", r, "] must be in [0, ", n_outputs,
                "), got ", s.rows[r]);
    }
}

NumberColumns check_sampling(const LlaisysSamplingMetadata &s, int32_t n_outputs, int64_t vocab) {
    const int32_t n = s.n_rows;
    require(n >= 0, "n_rows must be at least 0, got ", n);
    check_output_rows(s, n_outputs);
    check_natural("seq_ids", s.seq_ids, n);
    check_natural("positions", s.positions, n);
    check_natural("choices", s.choices, n);
    const NumberColumns numbers(s);
    for (int32_t r = 0; r < n; ++r) {
        const int32_t n_logprobs = numbers.row(r).n_logprobs;
        require(n_logprobs <= vocab, "n_logprobs[", r, "] must be at most the vocabulary, ", vocab,
                ", got ", n_logprobs);
    }
    check_chain(s);
    check_bias(s, vocab);
    check_masks(s);
    return numbers;
}

void SamplerHistory::check(int64_t seq, const char *field, const int64_t *tokens, int32_t n) const {
    require(seq >= 0, "seq_id must be at least 0, got ", seq);
    require(n >= 0, "n_", field, " must not be negative, got ", n);
    require(tokens != nullptr || n == 0, field, " is NULL, with ", n, " tokens");
    for (int32_t i = 0; i < n; ++i) {
        require(tokens[i] >= 0 && tokens[i] < vocab_, field, "[", i, "] must be in [0, ", vocab_,
                "), got ", tokens[i]);
    }
}

void SamplerHistory::reset(int64_t seq, const int64_t *prompt, int32_t n) {
    check(seq, "prompt", prompt, n);
    Entries entries;
    entries.reserve(size_t(n));
    for (int32_t i = 0; i < n; ++i) {
        entries.push_back({int32_t(prompt[i]), 0});
    }
    std::sort(entries.begin(), entries.end(),
              [](const Entry &a, const Entry &b) { return a.token < b.token; });
    entries.erase(std::unique(entries.begin(), entries.end(),
                              [](const Entry &a, const Entry &b) { return a.token == b.token; }),
                  entries.end());
    sequences_[seq] = std::move(entries);
}

void SamplerHistory::accept(int64_t seq, const int64_t *tokens, int32_t n) {
    check(seq, "tokens", tokens, n);
    Entries &entries = sequences_[seq];
    const size_t capacity = entries.size() + size_t(n);
    if (entries.capacity() < capacity) { // before the first change
        entries.reserve(std::max(capacity, 2 * entries.capacity()));
    }
    for (int32_t i = 0; i < n; ++i) {
        const int32_t token = int32_t(tokens[i]);
        const auto it =
            std::lower_bound(entries.begin(), entries.end(), token,
                             [](const Entry &entry, int32_t id) { return entry.token < id; });
        if (it != entries.end() && it->token == token) {
            it->sampled += 1;
        } else {
            entries.insert(it, {token, 1});
        }
    }
}

void SamplerHistory::forget(int64_t seq) {
    require(seq >= 0, "seq_id must be at least 0, got ", seq);
    sequences_.erase(seq);
}

const SamplerHistory::Entries *SamplerHistory::find(int64_t seq) const {
    const auto found = sequences_.find(seq);
    return found == sequences_.end() ? nullptr : &found->second;
}

} // namespace llaisys::runtime
