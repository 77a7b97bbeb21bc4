// Parameter checks of Sampler::sample, done before anything is sampled.
#include "base/check.hpp"
#include "runtime/runner/sampler.hpp"

#include <cmath>

namespace llaisys::runtime {

namespace {

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

} // namespace llaisys::runtime
