// Planning for the device sampler: the same ids and logprobs as from the host sampler.
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

bool Sampler::plan_greedy(const LlaisysSamplingMetadata &sampling, int32_t n_outputs,
                          SamplingPlan *plan) const {
    const NumberColumns numbers = check_sampling(sampling, n_outputs, vocab_);
    plan->async = SamplingPlan::Async::yes;
    plan->on_host.assign(size_t(sampling.n_rows), 0);
    plan->n_on_host = 0;
    plan->is_greedy = false;
    for (int32_t r = 0; r < sampling.n_rows; ++r) {
        const RowParams params = row_params(sampling, numbers, r);
        const Reduction reduction = reduction_of(params, 1);
        const bool is_best = reduction.kind == Reduction::best ||
                             (reduction.kind == Reduction::top_k && params.top_k == 1);
        if (!is_best || reduction.is_penalised || params.mask != nullptr || params.n_bias > 0 ||
            params.n_logprobs >= 0) {
            return false;
        }
    }
    plan->is_greedy = true;
    return true;
}

void Sampler::plan(const LlaisysSamplingMetadata &sampling, int32_t n_outputs, SamplingPlan *plan,
                   const int32_t *pending_rows) const {
    if (plan_greedy(sampling, n_outputs, plan)) {
        return;
    }
    const NumberColumns numbers(sampling);
    const int64_t k = std::min(vocab_, kMaxTopK);
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
    plan->bias_offsets.push_back(0);
    plan->history_offsets.push_back(0);
    plan->processor_offsets.push_back(0);
    std::vector<int32_t> order;
    for (int32_t r = 0; r < sampling.n_rows; ++r) {
        const RowParams params = row_params(sampling, numbers, r);
        const Reduction reduction = reduction_of(params, k);
        const bool is_on_device =
            plan_row(params, reduction, pending_rows != nullptr ? pending_rows[r] : -1, plan);
        plan->on_host[size_t(r)] = is_on_device ? 0 : 1;
        plan->n_on_host += is_on_device ? 0 : 1;
        plan->rows.push_back(sampling.rows != nullptr ? sampling.rows[r] : r);
        plan->temperatures.push_back(reduction.temperature);
        plan->uniforms.push_back(uniform(params.seed, params.choice, params.position));
        plan->mask_rows.push_back(sampling.mask_rows != nullptr ? sampling.mask_rows[r] : -1);
        if (is_on_device) {
            plan->needs_sums = plan->needs_sums || reduction.kind == Reduction::top_p;
            plan->needs_picks = plan->needs_picks || reduction.kind == Reduction::pick;
            plan->needs_raw = plan->needs_raw || params.n_logprobs >= 0;
            plan->n_logprobs = std::max(plan->n_logprobs, params.n_logprobs);
            plan->adjusts = plan->adjusts || params.mask != nullptr || params.n_bias > 0 ||
                            reduction.is_penalised;
            append_biases(params, plan, &order);
        }
        plan->bias_offsets.push_back(int32_t(plan->bias_ids.size()));
        const bool is_penalised = is_on_device && reduction.is_penalised;
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
    }
    if (plan->n_on_host > 0) {
        plan->async = SamplingPlan::Async::no;
    }
}

bool Sampler::plan_row(const RowParams &params, const Reduction &reduction, int32_t pending_row,
                       SamplingPlan *plan) {
    ops::SampleKind kind = ops::SampleKind::best;
    bool can_be = params.n_logprobs <= kMaxTopK;
    switch (reduction.kind) {
    case Reduction::full_row:
        can_be = false;
        break;
    case Reduction::best:
        break;
    case Reduction::pick:
        kind = ops::SampleKind::pick;
        break;
    default:
        kind = ops::SampleKind::cut;
        can_be = append_processors(params, reduction, &plan->processors, &plan->processor_values) &&
                 can_be;
    }
    // With an empty history and a pending token, the reduction does not include penalties.
    const bool begins = pending_row >= 0 && params.history != nullptr && params.history->empty();
    can_be = can_be && !begins;
    if (reduction.kind == Reduction::top_p || reduction.kind == Reduction::min_p) {
        plan->async = SamplingPlan::Async::maybe;
    }
    plan->kinds.push_back(int32_t(can_be ? kind : ops::SampleKind::best));
    plan->processor_offsets.push_back(int32_t(plan->processors.size()));
    return can_be;
}

} // namespace llaisys::runtime
