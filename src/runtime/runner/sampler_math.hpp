// Passes over a row of logits: loops that the compiler vectorizes. Every sum has a fixed order. NaN
// counts as -inf.
#pragma once

#include "base/sampling.hpp"

#include <cstdint>
#include <vector>

namespace llaisys::runtime {

struct Candidate {
    float logit;
    int32_t id;
};

// More likely first, lower id first on ties.
inline bool is_better(const Candidate &a, const Candidate &b) {
    return a.logit != b.logit ? a.logit > b.logit : a.id < b.id;
}

// The largest of x[n]; -inf when there is none.
float max_of(const float *x, int64_t n);

// The first index of the largest of x[n]; -1 when all are -inf.
int64_t argmax_of(const float *x, int64_t n);

// Whether all of x[n] are NaN.
bool is_all_nan(const float *x, int64_t n);

// Unnormalised probabilities: weights[i] = e^((x[i] - max) / temperature), summed in double per
// block of kWeightBlock. max = max_of(x, n), not -inf. With max = +inf each +inf has weight 1,
// others 0.
constexpr int64_t kWeightBlock = sampling::kBlock;
// weights: [n], block_sums: [ceil(n / kWeightBlock)]. Returns the sum of all.
double softmax_weights(const float *x, int64_t n, float max, float temperature, float *weights,
                       double *block_sums);

// The first index whose cumulative weight exceeds target, 0 <= target < the sum of all.
int64_t pick(const float *weights, const double *block_sums, int64_t n, double target);

// The min(k, number of logits above -inf) best of x[n], best first by is_better, or in the order of
// their ids. ids: [n], null: 0, 1, 2, ... Replaces *best, whose memory (at most n + kSelectSlack
// entries) is reused.
constexpr int64_t kSelectSlack = 1024;
enum class Order { best_first, by_id };
void select_best(const float *x, const int32_t *ids, int64_t n, int64_t k, Order order,
                 std::vector<Candidate> *best);

// The candidate {score, index into weights} at which the cumulative weight, in descending order of
// score, reaches `target`; the last one when it does not. Reorders *list, which must not be empty.
// O(n).
Candidate find_cutoff_in(std::vector<Candidate> *list, const float *weights, double target);

// The same for all of x[n] in the order of is_better: {logit, index}. weights, max and temperature
// as in softmax_weights(); some weight must be above 0. O(n).
Candidate find_cutoff(const float *x, const float *weights, int64_t n, float max, float temperature,
                      double target, std::vector<Candidate> *scratch);

} // namespace llaisys::runtime
