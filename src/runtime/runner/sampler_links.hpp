// The chain of samplers.
#pragma once

#include "runtime/runner/sampler_candidates.hpp"
#include "runtime/runner/sampler_params.hpp"

#include <utility>

namespace llaisys::runtime {

// The chain of a row that gives none, and its length.
std::pair<const uint8_t *, int32_t> default_chain();

// How many of the best logits of a row are enough to run the chain on, whatever the logits: 1 when it
// takes the most likely token, 0 when it needs them all.
int32_t best_needed(const RowParams &params);

// Applies the links of params.chain to what is left of a row. May throw std::bad_alloc.
void run_chain(Candidates *left, const RowParams &params);

} // namespace llaisys::runtime
