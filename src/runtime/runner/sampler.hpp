// Turns rows of logits into tokens. The contract of the parameters is LlaisysSamplingMetadata in
// include/llaisys/runtime/infer_types.h, the exact maths is docs/guides/sampling.md.
//
// A row's token depends on nothing but the row's logits, its parameters and the history of its
// sequence: not on the other rows, the number of threads, or what was sampled before.
#pragma once

#include "device/runtime.hpp"
#include "llaisys/runtime/infer_types.h"
#include "runtime/runner/sampler_history.hpp"
#include "runtime/runner/sampler_row.hpp"
#include "runtime/runner/sampling_plan.hpp"

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

namespace llaisys::device {
class ThreadPool;
}

namespace llaisys::runtime {

struct Reduction;

class Sampler {
public:
    // Rows are shared among the threads of a CPU stream, which must outlive the sampler.
    Sampler(const device::Stream &stream, int64_t vocab);

    int64_t vocab() const { return vocab_; }

    // Samples ids[n_rows] from logits [n_outputs, vocab] (host memory). Checks everything first, and
    // throws INVALID naming field, row, value and limit; ids and the logprobs are then unchanged.
    // Throws INVALID when mask and bias leave a row no token, INTERNAL when a row of logits is all
    // NaN (a single NaN counts as -inf); there are no logprobs then. The caller has checked
    // struct_size.
    void sample(const float *logits, int32_t n_outputs, const LlaisysSamplingMetadata &sampling,
                int32_t *ids);

    // Whether every row takes the largest logit of its output row as it is. Checks everything as
    // sample does.
    bool takes_best(const LlaisysSamplingMetadata &sampling, int32_t n_outputs) const;
    // What a device must find out about rows of which it brings the best k. Checks everything as
    // sample does. False where every row has to be looked at as a whole. late_rows [n_rows]: where the
    // sample that is not known yet has the last token of a row's history; -1: nowhere. Null: no row's.
    bool plan(const LlaisysSamplingMetadata &sampling, int32_t n_outputs, int64_t k,
              SamplingPlan *plan, const int32_t *late_rows = nullptr) const;
    // Gives output rows [n, vocab] in host memory, by their numbers.
    using FetchRows = std::function<const float *(const std::vector<int32_t> &outputs)>;
    // Samples as sample does, from what was found out about the rows of plan; fetches those for which
    // that is not enough, and returns how many these were.
    int32_t sample_reduced(const ReducedRows &found, const FetchRows &fetch,
                           const LlaisysSamplingMetadata &sampling, int32_t *ids);

    // Of row i of the last sample; valid until the next one. Throws INVALID for no such row.
    LlaisysLogprobs logprobs(int32_t i) const;
    // The last sample was sampled elsewhere, n rows without logprobs.
    void note_sampled(int32_t n);
    // The same with those that rows want.
    void note_sampled(const SampledRows &found, const LlaisysSamplingMetadata &sampling,
                      const int32_t *ids);
    // Forgets the rows of the last sample.
    void clear_logprobs() { n_rows_ = 0; }

    // What penalties look at. All throw INVALID, and change nothing, for a negative sequence or a
    // token outside the vocabulary.
    void reset(int64_t seq, const int64_t *prompt, int32_t n);
    void accept(int64_t seq, const int64_t *tokens, int32_t n);
    void forget(int64_t seq);
    bool has_history(int64_t seq) const { return history_.find(seq) != nullptr; }

private:
    void reserve_results(const LlaisysSamplingMetadata &sampling, const NumberColumns &numbers);
    RowParams row_params(const LlaisysSamplingMetadata &sampling, const NumberColumns &numbers,
                         int32_t r) const;
    void sample_row(const float *row, const RowParams &params, int32_t r, int thread);
    void sample_reduced(const ReducedRows &found, const RowParams &params, int32_t r,
                        int32_t output, int thread);
    // How a device samples a row; late_row as in plan.
    static void plan_sample(const RowParams &params, const Reduction &reduction, int32_t late_row,
                            SamplingPlan *plan);
    void raise_failure(const LlaisysSamplingMetadata &sampling) const;

    // Rows are sampled on the CPU: on the threads of the stream, or on our own when it has none.
    std::unique_ptr<device::Stream> own_stream_;
    device::ThreadPool &pool_;
    int64_t vocab_;
    SamplerHistory history_;
    std::vector<RowSampler> workers_; // one a thread

    // Of the last sample, by row. Grow-only.
    int32_t n_rows_ = 0;
    std::vector<int32_t> ids_;
    std::vector<RowStatus> status_;
    std::vector<int64_t> logprob_offsets_; // [n_rows + 1] into the two arrays below
    std::vector<int32_t> logprob_counts_, ranks_;
    std::vector<int32_t> logprob_ids_;
    std::vector<float> logprobs_;
};

// Throws INVALID unless every field of sampling is as infer_types.h demands; its numbers by field.
NumberColumns check_sampling(const LlaisysSamplingMetadata &sampling, int32_t n_outputs,
                             int64_t vocab);

// The part of it that needs the outputs.
void check_output_rows(const LlaisysSamplingMetadata &sampling, int32_t n_outputs);

} // namespace llaisys::runtime
