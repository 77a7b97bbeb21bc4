// Planning for the device sampler, and sampling from reduced rows: the same ids and logprobs as
// from full rows. Rows for which the reduction is insufficient are sampled from all logits.
#include "base/check.hpp"
#include "device/cpu/cpu_runtime.hpp"
#include "runtime/runner/sampler.hpp"
#include "runtime/runner/sampler_chain.hpp"
#include "runtime/runner/sampler_rng.hpp"

#include <algorithm>
#include <numeric>

namespace llaisys::runtime {

namespace {

// Sorted by id, stable: several biases of one token are added in the caller's order.
void append_biases(const RowParams &params, SamplingPlan *plan, std::vector<int32_t> *order) {
    order->resize(size_t(params.n_bias));
    std::iota(order->begin(), order->end(), 0);
    std::stable_sort(order->begin(), order->end(),
                     [&](int32_t a, int32_t b) { return params.bias_ids[a] < params.bias_ids[b]; });
    for (const int32_t i : *order) {
        plan->bias_ids.push_back(params.bias_ids[i]);
        plan->bias_values.push_back(params.bias_values[i]);
    }
}

} // namespace

bool Sampler::plan(const LlaisysSamplingMetadata &sampling, int32_t n_outputs, int64_t k,
                   SamplingPlan *plan, const int32_t *pending_rows) const {
    const NumberColumns numbers = check_sampling(sampling, n_outputs, vocab_);
    for (auto *integers :
         {&plan->rows, &plan->mask_rows, &plan->bias_offsets, &plan->bias_ids,
          &plan->history_offsets, &plan->history_tokens, &plan->history_sampled,
          &plan->pending_rows, &plan->kinds, &plan->processor_offsets, &plan->processors}) {
        integers->clear();
    }
    for (auto *reals :
         {&plan->temperatures, &plan->bias_values, &plan->penalties, &plan->processor_values}) {
        reals->clear();
    }
    plan->uniforms.clear();
    plan->needs_sums = plan->needs_picks = plan->needs_raw = plan->adjusts = false;
    plan->masks = sampling.masks;
    plan->n_masks = sampling.n_masks;
    plan->n_logprobs = 0;
    plan->async = SamplingPlan::Async::yes;
    plan->bias_offsets.push_back(0);
    plan->history_offsets.push_back(0);
    plan->processor_offsets.push_back(0);
    std::vector<int32_t> order;
    bool helps = false;
    for (int32_t r = 0; r < sampling.n_rows; ++r) {
        const RowParams params = row_params(sampling, numbers, r);
        const Reduction reduction = reduction_of(params, k);
        const bool needs_full_row = reduction.kind == Reduction::full_row || params.n_logprobs > k;
        helps = helps || !needs_full_row;
        plan->rows.push_back(sampling.rows != nullptr ? sampling.rows[r] : r);
        plan->temperatures.push_back(reduction.temperature);
        plan->uniforms.push_back(uniform(params.seed, params.choice, params.position));
        plan->mask_rows.push_back(sampling.mask_rows != nullptr ? sampling.mask_rows[r] : -1);
        if (!needs_full_row) {
            plan->needs_sums = plan->needs_sums || reduction.kind == Reduction::top_p;
            plan->needs_picks = plan->needs_picks || reduction.kind == Reduction::pick;
            plan->needs_raw = plan->needs_raw || params.n_logprobs >= 0;
            plan->n_logprobs = std::max(plan->n_logprobs, params.n_logprobs);
            plan->adjusts = plan->adjusts || params.mask != nullptr || params.n_bias > 0 ||
                            reduction.is_penalised;
            append_biases(params, plan, &order);
        }
        plan->bias_offsets.push_back(int32_t(plan->bias_ids.size()));
        const bool is_penalised = !needs_full_row && reduction.is_penalised;
        for (size_t i = 0; is_penalised && i < params.history->size(); ++i) {
            plan->history_tokens.push_back((*params.history)[i].token);
            plan->history_sampled.push_back((*params.history)[i].sampled);
        }
        plan->history_offsets.push_back(int32_t(plan->history_tokens.size()));
        plan->penalties.insert(plan->penalties.end(),
                               {params.repetition, params.presence, params.frequency});
        if (pending_rows != nullptr) {
            plan->pending_rows.push_back(is_penalised ? pending_rows[r] : -1);
        }
        plan_sample(params, reduction, pending_rows != nullptr ? pending_rows[r] : -1, plan);
    }
    return helps;
}

void Sampler::plan_sample(const RowParams &params, const Reduction &reduction, int32_t pending_row,
                          SamplingPlan *plan) {
    using Async = SamplingPlan::Async;
    ops::SampleKind kind = ops::SampleKind::cut;
    bool can_be = params.n_logprobs <= kMaxTopK;
    switch (reduction.kind) {
    case Reduction::full_row:
        can_be = false;
        break;
    case Reduction::best:
        kind = ops::SampleKind::best;
        break;
    case Reduction::pick:
        kind = ops::SampleKind::pick;
        break;
    default:
        can_be = append_processors(params, reduction, &plan->processors, &plan->processor_values) &&
                 can_be;
    }
    // With an empty history and a pending token, the reduction does not include penalties.
    const bool begins = pending_row >= 0 && params.history != nullptr && params.history->empty();
    const bool is_sure = reduction.kind != Reduction::top_p && reduction.kind != Reduction::min_p;
    if (!can_be || begins) {
        plan->async = Async::no;
    } else if (!is_sure && plan->async == Async::yes) {
        plan->async = Async::maybe;
    }
    plan->kinds.push_back(int32_t(kind));
    plan->processor_offsets.push_back(int32_t(plan->processors.size()));
}

int32_t Sampler::sample_reduced(const ReducedRows &found, const FetchRows &fetch,
                                const LlaisysSamplingMetadata &sampling, int32_t *ids) {
    const NumberColumns numbers(sampling);
    reserve_results(sampling, numbers);
    const auto output_of = [&](int32_t r) {
        return sampling.rows != nullptr ? sampling.rows[r] : r;
    };
    pool_.run(sampling.n_rows, [&](int64_t r, int thread) {
        const RowParams params = row_params(sampling, numbers, int32_t(r));
        sample_reduced(found, params, int32_t(r), output_of(int32_t(r)), thread);
    });
    std::vector<int32_t> missing; // sampled rows
    std::vector<int32_t> outputs;
    for (int32_t r = 0; r < sampling.n_rows; ++r) {
        if (status_[size_t(r)] != RowStatus::ok) {
            missing.push_back(r);
            outputs.push_back(output_of(r));
        }
    }
    if (!missing.empty()) {
        const float *rows = fetch(outputs);
        pool_.run(int64_t(missing.size()), [&](int64_t i, int thread) {
            const int32_t r = missing[size_t(i)];
            sample_row(rows + i * vocab_, row_params(sampling, numbers, r), r, thread);
        });
    }
    raise_failure(sampling);
    n_rows_ = sampling.n_rows;
    std::copy(ids_.begin(), ids_.begin() + n_rows_, ids);
    return int32_t(missing.size());
}

void Sampler::sample_reduced(const ReducedRows &found, const RowParams &params, int32_t r,
                             int32_t output, int thread) {
    const size_t i = size_t(r);
    const int64_t at = (found.is_adjusted ? r : output) * found.k;
    RowSampler &worker = workers_[size_t(thread)];
    logprob_counts_[i] = 0;
    ranks_[i] = 0;
    if (params.n_logprobs > found.k) {
        status_[i] = RowStatus::needs_full_row;
        return;
    }
    const BestLogits best{found.ids + at, found.values + at, found.k, vocab_};
    status_[i] =
        worker.sample_reduced(best, found.sums != nullptr ? found.sums[r] : 0,
                              found.picks != nullptr ? found.picks[r] : -1, params, &ids_[i]);
    if (status_[i] == RowStatus::ok && params.n_logprobs >= 0) {
        const int64_t raw_at = output * found.k;
        const BestLogits raw{found.raw_ids + raw_at, found.raw_values + raw_at, found.k, vocab_};
        const int64_t to = logprob_offsets_[i];
        status_[i] = RowSampler::logprobs_of_best(
            raw, found.raw_sums[r], ids_[i], params.n_logprobs, logprob_ids_.data() + to,
            logprobs_.data() + to, &logprob_counts_[i], &ranks_[i]);
    }
}

} // namespace llaisys::runtime
