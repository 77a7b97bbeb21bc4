#include "runtime/runner/sampler_math.hpp"

#include <algorithm>
#include <limits>

namespace llaisys::runtime {

namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr int kLanes = 16;

void exp_block(const float *x, int64_t n, float max, float temperature, float *weights) {
    if (temperature == 1.0f) {
        for (int64_t i = 0; i < n; ++i) {
            weights[i] = sampling::exp_of(x[i] - max);
        }
    } else {
        for (int64_t i = 0; i < n; ++i) {
            weights[i] = sampling::exp_of((x[i] - max) / temperature);
        }
    }
}

double sum_block(const float *weights, int64_t n) {
    double lanes[8] = {};
    int64_t i = 0;
    for (; i + 8 <= n; i += 8) {
        for (int l = 0; l < 8; ++l) {
            lanes[l] += double(weights[i + l]);
        }
    }
    for (int l = 0; i < n; ++i, ++l) {
        lanes[l] += double(weights[i]);
    }
    return ((lanes[0] + lanes[4]) + (lanes[2] + lanes[6])) +
           ((lanes[1] + lanes[5]) + (lanes[3] + lanes[7]));
}

// Reduces *best to its k best.
void cut(std::vector<Candidate> *best, int64_t k) {
    if (int64_t(best->size()) > k) {
        std::nth_element(best->begin(), best->begin() + (k - 1), best->end(), is_better);
        best->resize(size_t(k));
    }
}

} // namespace

float max_of(const float *x, int64_t n) {
    float lanes[kLanes];
    std::fill(lanes, lanes + kLanes, -kInf);
    int64_t i = 0;
    for (; i + kLanes <= n; i += kLanes) {
        for (int l = 0; l < kLanes; ++l) {
            lanes[l] = x[i + l] > lanes[l] ? x[i + l] : lanes[l];
        }
    }
    float max = -kInf;
    for (; i < n; ++i) {
        max = x[i] > max ? x[i] : max;
    }
    for (const float lane : lanes) {
        max = lane > max ? lane : max;
    }
    return max;
}

int64_t argmax_of(const float *x, int64_t n) {
    constexpr int64_t kBlock = 1024;
    float best = -kInf;
    int64_t at = -1;
    for (int64_t begin = 0; begin < n; begin += kBlock) {
        const float max = max_of(x + begin, std::min(kBlock, n - begin));
        if (max > best) {
            best = max;
            at = begin;
        }
    }
    while (at >= 0 && x[at] != best) {
        ++at;
    }
    return at;
}

bool is_all_nan(const float *x, int64_t n) {
    return std::all_of(x, x + n, [](float value) { return value != value; });
}

double softmax_weights(const float *x, int64_t n, float max, float temperature, float *weights,
                       double *block_sums) {
    double sum = 0;
    for (int64_t begin = 0; begin < n; begin += kWeightBlock) {
        const int64_t count = std::min(kWeightBlock, n - begin);
        if (max == kInf) {
            for (int64_t i = begin; i < begin + count; ++i) {
                weights[i] = x[i] == kInf ? 1.0f : 0.0f;
            }
        } else {
            exp_block(x + begin, count, max, temperature, weights + begin);
        }
        block_sums[begin / kWeightBlock] = sum_block(weights + begin, count);
        sum += block_sums[begin / kWeightBlock];
    }
    return sum;
}

int64_t pick(const float *weights, const double *block_sums, int64_t n, double target) {
    double below = 0; // weight of all earlier blocks
    int64_t begin = 0;
    int64_t fallback = 0; // the last block with a weight above 0
    for (; begin < n; begin += kWeightBlock) {
        const double sum = block_sums[begin / kWeightBlock];
        fallback = sum > 0 ? begin : fallback;
        if (below + sum > target) {
            break;
        }
        below += sum;
    }
    begin = begin < n ? begin : fallback;
    const int64_t end = std::min(n, begin + kWeightBlock);
    int64_t last = begin; // rounding may leave the sum of the block below the target
    for (int64_t i = begin; i < end; ++i) {
        if (weights[i] > 0) {
            last = i;
            below += double(weights[i]);
            if (below > target) {
                break;
            }
        }
    }
    return last;
}

void select_best(const float *x, const int32_t *ids, int64_t n, int64_t k, Order order,
                 std::vector<Candidate> *best) {
    best->clear();
    const size_t capacity = size_t(std::min(n, 2 * std::min(k, n) + kSelectSlack));
    best->reserve(capacity);
    float floor = -kInf; // a logit not above it is not among the k best: ids ascend
    for (int64_t begin = 0; begin < n; begin += kLanes) {
        const int64_t end = std::min(n, begin + kLanes);
        if (end - begin == kLanes) {
            int any = 0;
            for (int l = 0; l < kLanes; ++l) {
                any |= int(x[begin + l] > floor);
            }
            if (any == 0) {
                continue;
            }
        }
        for (int64_t i = begin; i < end; ++i) {
            if (!(x[i] > floor)) {
                continue;
            }
            if (best->size() == capacity) {
                cut(best, k);
                floor = best->back().logit; // the k-th best, by nth_element
                if (!(x[i] > floor)) {
                    continue;
                }
            }
            best->push_back({x[i], ids == nullptr ? int32_t(i) : ids[i]});
        }
    }
    cut(best, k);
    if (order == Order::best_first) {
        std::sort(best->begin(), best->end(), is_better);
    } else {
        std::sort(best->begin(), best->end(),
                  [](const Candidate &a, const Candidate &b) { return a.id < b.id; });
    }
}

// Quickselect by weight: halves without the cutoff are not sorted.
Candidate find_cutoff_in(std::vector<Candidate> *list, const float *weights, double target) {
    auto begin = list->begin();
    auto end = list->end();
    while (end - begin > 64) {
        const auto middle = begin + (end - begin) / 2;
        std::nth_element(begin, middle, end, is_better);
        double sum = 0;
        for (auto it = begin; it != middle; ++it) {
            sum += double(weights[it->id]);
        }
        if (sum >= target) {
            end = middle;
        } else {
            target -= sum;
            begin = middle;
        }
    }
    std::sort(begin, end, is_better);
    for (; begin + 1 != end; ++begin) {
        target -= double(weights[begin->id]);
        if (target <= 0) {
            break;
        }
    }
    return *begin;
}

Candidate find_cutoff(const float *x, const float *weights, int64_t n, float max, float temperature,
                      double target, std::vector<Candidate> *scratch) {
    double mass[sampling::kCutoffBins] = {};
    for (int64_t i = 0; i < n; ++i) {
        if (weights[i] > 0) {
            mass[sampling::cutoff_bin(x[i], max, temperature)] += double(weights[i]);
        }
    }
    int bin = 0;
    for (int next = 0; next < sampling::kCutoffBins;
         ++next) { // ends at the last bin with a weight above 0
        if (mass[next] > 0) {
            target -= mass[bin] * double(next != bin);
            bin = next;
            if (mass[bin] >= target) {
                break;
            }
        }
    }
    scratch->clear();
    for (int64_t i = 0; i < n; ++i) {
        if (weights[i] > 0 && sampling::cutoff_bin(x[i], max, temperature) == bin) {
            scratch->push_back({x[i], int32_t(i)});
        }
    }
    return find_cutoff_in(scratch, weights, target);
}

} // namespace llaisys::runtime
