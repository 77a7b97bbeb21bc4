// Sampling parameters: the table of numeric parameters, checks, the parameters of one row and the
// token histories that penalties use.
#pragma once

#include "llaisys/runtime/infer_types.h"

#include <array>
#include <cstdint>
#include <iterator>
#include <limits>
#include <unordered_map>
#include <vector>

namespace llaisys::runtime {

// Numeric parameters of a row; the defaults are neutral.
struct RowNumbers {
    float temperature = 1;
    float top_p = 1;
    float min_p = 0;
    float typical_p = 1;
    float top_n_sigma = 0;
    float xtc_probability = 0;
    float xtc_threshold = 0.1f;
    float dynatemp_range = 0;
    float dynatemp_exponent = 1;
    float mirostat_mu = 10;
    float repetition = 1;
    float presence = 0;
    float frequency = 0;
    int32_t top_k = 0;
    int32_t mirostat = 0;            // version
    int32_t n_logprobs = -1;         // also at most the vocabulary
    int32_t post_sampling_probs = 0; // 1: n_logprobs are those after the chain
};

// Finite numbers in [low, high], or (low, high] with above_low.
struct Limits {
    double low = -std::numeric_limits<double>::infinity();
    double high = std::numeric_limits<double>::infinity();
    bool above_low = false;
};

// A numeric parameter: public name (LlaisysSamplingNumber), member and limits.
struct NumberField {
    const char *name;
    float RowNumbers::*real = nullptr; // exactly one of the two is set
    int32_t RowNumbers::*integer = nullptr;
    Limits limits;

    constexpr NumberField(const char *name, float RowNumbers::*member, Limits limits = {})
        : name(name), real(member), limits(limits) {}
    constexpr NumberField(const char *name, int32_t RowNumbers::*member, Limits limits = {})
        : name(name), integer(member), limits(limits) {}

    double of(const RowNumbers &numbers) const {
        return real != nullptr ? double(numbers.*real) : double(numbers.*integer);
    }
    void set(RowNumbers *numbers, double value) const {
        if (real != nullptr) {
            numbers->*real = float(value);
        } else {
            numbers->*integer = int32_t(value);
        }
    }
};

// To add a number, add a member above and an entry here; parsing, checks and tests use this table.
inline constexpr NumberField kNumberFields[] = {
    {"temperature", &RowNumbers::temperature, {0}},
    {"top_p", &RowNumbers::top_p, {0, 1, true}},
    {"min_p", &RowNumbers::min_p, {0, 1}},
    {"typical_p", &RowNumbers::typical_p, {0, 1, true}},
    {"top_n_sigma", &RowNumbers::top_n_sigma, {0}},
    {"xtc_probability", &RowNumbers::xtc_probability, {0, 1}},
    {"xtc_threshold", &RowNumbers::xtc_threshold, {0, 1}},
    {"dynatemp_range", &RowNumbers::dynatemp_range, {0}},
    {"dynatemp_exponent",
     &RowNumbers::dynatemp_exponent,
     {0, std::numeric_limits<double>::infinity(), true}},
    {"mirostat_mu", &RowNumbers::mirostat_mu},
    {"repetition_penalty",
     &RowNumbers::repetition,
     {0, std::numeric_limits<double>::infinity(), true}},
    {"presence_penalty", &RowNumbers::presence},
    {"frequency_penalty", &RowNumbers::frequency},
    {"top_k", &RowNumbers::top_k, {0}},
    {"mirostat", &RowNumbers::mirostat, {0, 2}},
    {"n_logprobs", &RowNumbers::n_logprobs, {-1}},
    {"post_sampling_probs", &RowNumbers::post_sampling_probs, {0, 1}},
};

// Numeric parameters of a call, by field. A view of the caller's arrays.
class NumberColumns {
public:
    // Throws INVALID naming number, row, value and limit unless every value is within its limits.
    // n_rows must not be negative.
    explicit NumberColumns(const LlaisysSamplingMetadata &sampling);

    RowNumbers row(int32_t r) const;

private:
    std::array<const double *, std::size(kNumberFields)> values_{}; // null: neutral
};

// Throws INVALID unless every field of sampling meets infer_types.h; returns its numbers by field.
NumberColumns check_sampling(const LlaisysSamplingMetadata &sampling, int32_t n_outputs,
                             int64_t vocab);

// The part of check_sampling that needs the number of outputs.
void check_output_rows(const LlaisysSamplingMetadata &sampling, int32_t n_outputs);

// Token history of each sequence, for penalties.
class SamplerHistory {
public:
    // A token of the sequence and how often it was sampled (0: in the prompt only).
    struct Entry {
        int32_t token;
        int32_t sampled;
    };
    using Entries = std::vector<Entry>; // sorted by token, distinct

    explicit SamplerHistory(int64_t vocab) : vocab_(vocab) {}

    // Throw INVALID and change nothing for a negative sequence, a negative n, a missing array or a
    // token outside [0, vocab).
    void reset(int64_t seq, const int64_t *prompt, int32_t n);
    void accept(int64_t seq, const int64_t *tokens, int32_t n);
    void forget(int64_t seq);

    // null: the sequence has no history.
    const Entries *find(int64_t seq) const;

private:
    void check(int64_t seq, const char *field, const int64_t *tokens, int32_t n) const;

    int64_t vocab_;
    std::unordered_map<int64_t, Entries> sequences_;
};

// All sampling parameters of a row, validated. Pointers are views.
struct RowParams : RowNumbers {
    uint64_t seed = 0;
    int64_t position = 0;
    int32_t choice = 0;
    const uint8_t *chain = nullptr; // [n_chain] LlaisysSamplerKind
    int32_t n_chain = 0;
    const int32_t *bias_ids = nullptr; // [n_bias]
    const float *bias_values = nullptr;
    int32_t n_bias = 0;
    const uint32_t *mask = nullptr;                   // [(vocab + 31) / 32]; null: all allowed
    const SamplerHistory::Entries *history = nullptr; // null: none
};

} // namespace llaisys::runtime
