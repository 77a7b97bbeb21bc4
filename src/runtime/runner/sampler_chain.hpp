// The sampler chain: a list of logits processors per row.
#pragma once

#include "ops/sample_rows/op.hpp"
#include "runtime/runner/sampler_candidates.hpp"
#include "runtime/runner/sampler_params.hpp"

#include <utility>
#include <vector>

namespace llaisys::runtime {

// The default chain and its length.
std::pair<const uint8_t *, int32_t> default_chain();

// Size of the top-k that usually suffices: top_p tries it before all logits.
constexpr int64_t kMaxTopK = ops::kMaxTopK;

// What suffices to sample a row instead of all its logits, after mask, bias and penalties: the top
// k logits, the sum of all weights, or the index picked from all weights.
struct Reduction {
    enum Kind : uint8_t {
        full_row, // all logits
        best,     // the largest
        top_k,    // the top k, then the chain from `first` on
        top_p,    // the same with the sum of weights, if the top k cover top_p
        min_p,    // the same if the top k cover min_p
        pick      // the picked index: the chain removes no token
    };
    Kind kind = full_row;
    int32_t first = 0;         // the first processor that removes tokens
    float temperature = 1;     // of the logits at that processor
    bool is_penalised = false; // penalties come before it
};
Reduction reduction_of(const RowParams &params, int64_t k);
// Appends the non-neutral processors from reduction.first on for ops::sample_rows; false when it
// does not support one of them.
bool append_processors(const RowParams &params, const Reduction &reduction,
                       std::vector<int32_t> *processors, std::vector<float> *values);

// Applies the processors of params.chain. May throw std::bad_alloc.
void run_chain(Candidates *candidates, const RowParams &params);

} // namespace llaisys::runtime
