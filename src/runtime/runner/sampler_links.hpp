// The chain of samplers.
#pragma once

#include "ops/sample_rows/op.hpp"
#include "runtime/runner/sampler_candidates.hpp"
#include "runtime/runner/sampler_params.hpp"

#include <utility>
#include <vector>

namespace llaisys::runtime {

// The chain of a row that gives none, and its length.
std::pair<const uint8_t *, int32_t> default_chain();

// So many of the best are mostly enough: top_p looks at these before it looks at all, and a device
// brings as many to the host.
constexpr int64_t kFewBest = ops::kMostBest;

// What a row can be sampled from instead of all its logits, given that mask, bias and penalties have been
// applied to them: the best k, the sum of all weights and the index that these would pick.
struct Reduction {
    enum Kind : uint8_t {
        whole, // all logits
        best,  // the largest
        top_k, // the best k: the chain from `first` on
        top_p, // the same with the sum of the weights, when they reach far enough
        min_p, // the best k, when they reach far enough: the chain from `first` on
        pick   // nothing is cut off
    };
    Kind kind = whole;
    int32_t first = 0;         // the link that cuts first
    float temperature = 1;     // of the logits there
    bool is_penalised = false; // a link before it was the penalties
};
Reduction reduction_of(const RowParams &params, int64_t k);
// Appends the links from reduction.first on that change something, for ops::sample_rows; false where one of
// them is none of its links.
bool append_links(const RowParams &params, const Reduction &reduction, std::vector<int32_t> *links,
                  std::vector<float> *values);

// Applies the links of params.chain from `first` on to what is left of a row. May throw
// std::bad_alloc.
void run_chain(Candidates *left, const RowParams &params, int32_t first = 0);

} // namespace llaisys::runtime
