// The chain of samplers.
#pragma once

#include "runtime/runner/sampler_candidates.hpp"
#include "runtime/runner/sampler_params.hpp"

#include <utility>

namespace llaisys::runtime {

// The chain of a row that gives none, and its length.
std::pair<const uint8_t *, int32_t> default_chain();

// Whether the chain takes the most likely token, whatever the logits.
bool chain_takes_best(const RowParams &params);

// Applies the links of params.chain to what is left of a row. May throw std::bad_alloc.
void run_chain(Candidates *left, const RowParams &params);

} // namespace llaisys::runtime
