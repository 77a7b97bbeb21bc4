// One row: mask, bias, chain, draw, logprobs. A RowSampler belongs to one thread and keeps its
// scratch from row to row.
#pragma once

#include "llaisys/runtime/infer_types.h"
#include "runtime/runner/sampler_history.hpp"
#include "runtime/runner/sampler_math.hpp"

#include <cstdint>
#include <vector>

namespace llaisys::runtime {

// The parameters of one row, checked. Pointers are views.
struct RowParams {
    float temperature = 1, top_p = 1, min_p = 0, typical_p = 1;
    float xtc_probability = 0, xtc_threshold = 0.1f;
    float repetition = 1, presence = 0, frequency = 0;
    int32_t top_k = 0;
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

enum class RowStatus : uint8_t { ok, nothing_left, all_nan, no_memory };

class RowSampler {
public:
    // Draws one token of logits [vocab]. Never throws.
    RowStatus draw(const float *logits, int64_t vocab, const RowParams &params,
                   int32_t *id) noexcept;

    // The log-probabilities of logits [vocab]: ids[0] = the drawn token, then up to n best that are
    // above -inf. *count: entries written, at most 1 + n. *rank: 1 + the tokens before it in the
    // order of the best. Never throws.
    RowStatus logprobs(const float *logits, int64_t vocab, int32_t drawn, int32_t n, int32_t *ids,
                       float *values, int32_t *count, int32_t *rank) noexcept;

private:
    template <typename T> static void grow(std::vector<T> *values, int64_t n) {
        if (int64_t(values->size()) < n) {
            values->resize(size_t(n));
        }
    }
    void begin(const float *logits, int64_t vocab);
    void make_own(); // from here on the logits may be changed
    void apply_mask(const uint32_t *mask);
    void apply_bias(const RowParams &params);
    // The links, in sampler_links.cpp; each changes what is left.
    struct Link;
    static const Link &link_of(uint8_t kind);
    static bool is_in_vain(const RowParams &params, int32_t i);
    void run_chain(const RowParams &params);
    void apply_penalties(const RowParams &params);
    void apply_temperature(const RowParams &params);
    void keep_top_k(const RowParams &params);
    void keep_top_p(const RowParams &params);
    void keep_min_p(const RowParams &params);
    void keep_typical(const RowParams &params);
    void exclude_top(const RowParams &params);

    template <typename Keep> void keep_where(const float *score, float floor, const Keep &keep);
    void keep_selected(); // what is left is selected_
    double weigh_left();
    int64_t pick_left(const RowParams &params); // index into what is left; -1: all are -inf
    int32_t id_of(int64_t index) const { return ids_ == nullptr ? int32_t(index) : ids_[index]; }

    // What is left of the row, in the order of ids: logit x_[i] of token id_of(i). ids_ is null as
    // long as nothing was cut off.
    const float *x_ = nullptr;
    const int32_t *ids_ = nullptr;
    int64_t n_ = 0;
    float temperature_ = 1; // still to be applied to x_

    // Grow-only; x_ and ids_ point into the first two once they differ from the caller's row.
    std::vector<float> own_;
    std::vector<int32_t> own_ids_;
    std::vector<float> weights_;
    std::vector<double> block_sums_;
    std::vector<float> scores_;
    std::vector<Candidate> selected_;
};

} // namespace llaisys::runtime
