// The host sampler. LlaisysSamplingMetadata in include/llaisys/runtime/infer_types.h specifies the
// parameters, docs/guides/sampling.md the exact maths.
//
// The token of a row depends only on its logits, its parameters and the history of its sequence:
// not on other rows, the number of threads or earlier calls.
#pragma once

#include "device/runtime.hpp"
#include "llaisys/runtime/infer_types.h"
#include "runtime/runner/sampler_row.hpp"
#include "runtime/runner/sampling_plan.hpp"

#include <cstdint>
#include <memory>
#include <vector>

namespace llaisys::device {
class ThreadPool;
}

namespace llaisys::runtime {

struct Reduction;

class Sampler {
public:
    // Rows are distributed over the threads of a CPU stream, which must outlive the sampler.
    Sampler(const device::Stream &stream, int64_t vocab);

    int64_t vocab() const { return vocab_; }

    // Samples ids[n_rows] from logits [n_outputs, vocab] (host memory). Checks all parameters
    // first: throws INVALID naming field, row, value and limit, with ids and logprobs unchanged.
    // Throws INVALID when mask and bias ban every token of a row, INTERNAL when all logits of a row
    // are NaN (a single NaN counts as -inf); logprobs are then cleared. The caller has checked
    // struct_size.
    void sample(const float *logits, int32_t n_outputs, const LlaisysSamplingMetadata &sampling,
                int32_t *ids);

    // Plans how the device sampler samples the rows. Checks parameters like sample(). pending_rows
    // [n_rows]: row of the queued sampling that holds the last token of a row's history; -1: none.
    // Null: none for all.
    void plan(const LlaisysSamplingMetadata &sampling, int32_t n_outputs, SamplingPlan *plan,
              const int32_t *pending_rows = nullptr) const;
    // The same for rows that are the argmax of their output row; false: one is not.
    bool plan_greedy(const LlaisysSamplingMetadata &sampling, int32_t n_outputs,
                     SamplingPlan *plan) const;
    // Samples the given rows of the call that record_sampled() recorded, from logits
    // [rows.size(), vocab]; throws like sample() after its checks.
    void sample_rows(const float *logits, const std::vector<int32_t> &rows,
                     const LlaisysSamplingMetadata &sampling, int32_t *ids);

    // Logprobs of row i of the last call; valid until the next one. Throws INVALID for an unknown
    // row.
    LlaisysLogprobs logprobs(int32_t i) const;
    // Records that the device sampled the last call, with the logprobs that it found.
    void record_sampled(const SampledRows &found, const LlaisysSamplingMetadata &sampling,
                        const int32_t *ids);
    // Discards the logprobs of the last call.
    void clear_logprobs() { n_rows_ = 0; }

    // Token history for penalties. All throw INVALID and change nothing for a negative sequence or
    // a token outside the vocabulary.
    void reset(int64_t seq, const int64_t *prompt, int32_t n) { history_.reset(seq, prompt, n); }
    void accept(int64_t seq, const int64_t *tokens, int32_t n) { history_.accept(seq, tokens, n); }
    void forget(int64_t seq) { history_.forget(seq); }
    bool has_history(int64_t seq) const { return history_.find(seq) != nullptr; }

private:
    void reserve_results(const LlaisysSamplingMetadata &sampling, const NumberColumns &numbers);
    RowParams row_params(const LlaisysSamplingMetadata &sampling, const NumberColumns &numbers,
                         int32_t r) const;
    void sample_row(const float *row, const RowParams &params, int32_t r, int thread);
    // Appends the processors of a row to the plan; pending_row as in plan(). False: the device
    // cannot sample the row.
    static bool plan_row(const RowParams &params, const Reduction &reduction, int32_t pending_row,
                         SamplingPlan *plan);
    void raise_failure(const LlaisysSamplingMetadata &sampling, int32_t r) const;

    // The stream for CPU threads when the runner's stream is not a CPU stream.
    std::unique_ptr<device::Stream> own_stream_;
    device::ThreadPool &pool_;
    int64_t vocab_;
    SamplerHistory history_;
    std::vector<RowSampler> workers_; // one per thread

    // Results of the last call, by row. Grow-only.
    int32_t n_rows_ = 0;
    std::vector<int32_t> ids_;
    std::vector<RowStatus> status_;
    std::vector<int64_t> logprob_offsets_; // [n_rows + 1] into the two arrays below
    std::vector<int32_t> logprob_counts_, ranks_;
    std::vector<int32_t> logprob_ids_;
    std::vector<float> logprobs_;
};

} // namespace llaisys::runtime
