#include "runtime/runner/sampler.hpp"

#include "base/check.hpp"
#include "device/cpu/cpu_runtime.hpp"
#include "runtime/runner/sampler_chain.hpp"

#include <algorithm>
#include <limits>
#include <tuple>

namespace llaisys::runtime {

namespace {

template <typename T> T entry_or(const T *values, int32_t r, T neutral) {
    return values == nullptr ? neutral : values[r];
}

} // namespace

Sampler::Sampler(const device::Stream &stream, int64_t vocab)
    : own_stream_(stream.type() == LLAISYS_DEVICE_CPU
                      ? nullptr
                      : std::make_unique<device::Stream>(LLAISYS_DEVICE_CPU, 0, 0)),
      pool_(device::pool_of(own_stream_ ? *own_stream_ : stream)), vocab_(vocab), history_(vocab) {
    require(vocab >= 1 && vocab <= std::numeric_limits<int32_t>::max(),
            "vocabulary must be in [1, ", std::numeric_limits<int32_t>::max(), "], got ", vocab);
    workers_.resize(size_t(pool_.size()));
}

void Sampler::sample(const float *logits, int32_t n_outputs,
                     const LlaisysSamplingMetadata &sampling, int32_t *ids) {
    const NumberColumns numbers = check_sampling(sampling, n_outputs, vocab_);
    require((logits != nullptr && ids != nullptr) || sampling.n_rows == 0,
            logits == nullptr ? "logits" : "ids", " is NULL, with ", sampling.n_rows, " rows");
    reserve_results(sampling, numbers);
    pool_.run(sampling.n_rows, [&](int64_t r, int thread) {
        const float *row = logits + entry_or(sampling.rows, int32_t(r), int32_t(r)) * vocab_;
        sample_row(row, row_params(sampling, numbers, int32_t(r)), int32_t(r), thread);
    });
    for (int32_t r = 0; r < sampling.n_rows; ++r) {
        raise_failure(sampling, r);
    }
    n_rows_ = sampling.n_rows;
    std::copy(ids_.begin(), ids_.begin() + n_rows_, ids);
}

void Sampler::sample_rows(const float *logits, const std::vector<int32_t> &rows,
                          const LlaisysSamplingMetadata &sampling, int32_t *ids) {
    const NumberColumns numbers(sampling);
    reserve_results(sampling, numbers); // keeps the logprobs of the other rows
    pool_.run(int64_t(rows.size()), [&](int64_t i, int thread) {
        const int32_t r = rows[size_t(i)];
        sample_row(logits + i * vocab_, row_params(sampling, numbers, r), r, thread);
    });
    for (const int32_t r : rows) {
        raise_failure(sampling, r);
    }
    n_rows_ = sampling.n_rows;
    for (const int32_t r : rows) {
        ids[r] = ids_[size_t(r)];
    }
}

void Sampler::reserve_results(const LlaisysSamplingMetadata &sampling,
                              const NumberColumns &numbers) {
    const size_t n = size_t(sampling.n_rows);
    n_rows_ = 0; // valid only after all rows are sampled
    ids_.resize(std::max(ids_.size(), n));
    status_.resize(std::max(status_.size(), n));
    logprob_counts_.resize(std::max(logprob_counts_.size(), n));
    ranks_.resize(std::max(ranks_.size(), n));
    logprob_offsets_.resize(std::max(logprob_offsets_.size(), n + 1));
    logprob_offsets_[0] = 0;
    for (int32_t r = 0; r < sampling.n_rows; ++r) {
        const int64_t capacity = int64_t(numbers.row(r).n_logprobs) + 1;
        logprob_offsets_[size_t(r) + 1] = logprob_offsets_[size_t(r)] + capacity;
    }
    const size_t total = size_t(logprob_offsets_[n]);
    logprob_ids_.resize(std::max(logprob_ids_.size(), total));
    logprobs_.resize(std::max(logprobs_.size(), total));
}

RowParams Sampler::row_params(const LlaisysSamplingMetadata &s, const NumberColumns &numbers,
                              int32_t r) const {
    RowParams params{numbers.row(r)};
    params.seed = entry_or(s.seeds, r, uint64_t(0));
    params.position = entry_or(s.positions, r, int64_t(0));
    params.choice = entry_or(s.choices, r, 0);
    std::tie(params.chain, params.n_chain) = default_chain();
    if (s.chain_offsets != nullptr) {
        params.n_chain = s.chain_offsets[r + 1] - s.chain_offsets[r];
        params.chain = params.n_chain == 0 ? nullptr : s.chain + s.chain_offsets[r];
    }
    if (s.bias_offsets != nullptr && s.bias_offsets[r + 1] > s.bias_offsets[r]) {
        params.n_bias = s.bias_offsets[r + 1] - s.bias_offsets[r];
        params.bias_ids = s.bias_ids + s.bias_offsets[r];
        params.bias_values = s.bias_values + s.bias_offsets[r];
    }
    const int32_t mask_row = entry_or(s.mask_rows, r, -1);
    if (mask_row >= 0) {
        params.mask = s.masks + int64_t(mask_row) * ((vocab_ + 31) / 32);
    }
    params.history = s.seq_ids == nullptr ? nullptr : history_.find(s.seq_ids[r]);
    return params;
}

void Sampler::sample_row(const float *row, const RowParams &params, int32_t r, int thread) {
    RowSampler &worker = workers_[size_t(thread)];
    const size_t i = size_t(r);
    status_[i] = worker.sample(row, vocab_, params, &ids_[i]);
    logprob_counts_[i] = 0;
    ranks_[i] = 0;
    if (status_[i] == RowStatus::ok && params.n_logprobs >= 0) {
        const int64_t at = logprob_offsets_[i];
        if (params.post_sampling_probs == 0) {
            worker.begin_logprobs(row, vocab_);
        }
        status_[i] = worker.logprobs(ids_[i], params.n_logprobs, logprob_ids_.data() + at,
                                     logprobs_.data() + at, &logprob_counts_[i], &ranks_[i]);
    }
}

void Sampler::raise_failure(const LlaisysSamplingMetadata &sampling, int32_t r) const {
    switch (status_[size_t(r)]) {
    case RowStatus::ok:
        break;
    case RowStatus::nothing_left:
        fail(LLAISYS_ERROR_INVALID, "row ", r, " has no token left: masks and bias_values ban all ",
             vocab_);
    case RowStatus::all_nan:
        ensure(false, "all logits of output row ", entry_or(sampling.rows, r, r), " (row ", r,
               ") are NaN");
        break;
    case RowStatus::no_memory:
        fail(LLAISYS_ERROR_MEMORY, "no memory for scratch of row ", r, " (vocabulary ", vocab_,
             ")");
    }
}

void Sampler::record_sampled(const SampledRows &found, const LlaisysSamplingMetadata &sampling,
                             const int32_t *ids) {
    n_rows_ = sampling.n_rows;
    logprob_counts_.resize(std::max(logprob_counts_.size(), size_t(n_rows_)));
    std::fill_n(logprob_counts_.begin(), n_rows_, 0);
    if (found.ids == nullptr) {
        return;
    }
    const NumberColumns numbers(sampling);
    reserve_results(sampling, numbers);
    for (int32_t r = 0; r < sampling.n_rows; ++r) {
        const size_t i = size_t(r);
        const int32_t n = numbers.row(r).n_logprobs;
        if (n < 0 || n > found.k) { // the host samples rows with more
            continue;
        }
        const int64_t at = r * found.k;
        const BestLogits best{found.ids + at, found.values + at, found.k};
        const int64_t to = logprob_offsets_[i];
        ranks_[i] = found.ranks[r];
        logprob_counts_[i] =
            RowSampler::logprobs_of_sampled(best, found.sums[r], ids[r], found.logits[r], n,
                                            logprob_ids_.data() + to, logprobs_.data() + to);
    }
    n_rows_ = sampling.n_rows;
}

LlaisysLogprobs Sampler::logprobs(int32_t i) const {
    require(i >= 0 && i < n_rows_, "row must be in [0, ", n_rows_, "), got ", i);
    const size_t r = size_t(i);
    const int32_t n = logprob_counts_[r];
    if (n == 0) {
        return {0, 0, nullptr, nullptr};
    }
    return {n, ranks_[r], logprob_ids_.data() + logprob_offsets_[r],
            logprobs_.data() + logprob_offsets_[r]};
}

} // namespace llaisys::runtime
