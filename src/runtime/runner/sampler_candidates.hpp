// What is left of a row of logits while the chain cuts it down.
#pragma once

#include "runtime/runner/sampler_math.hpp"

#include <algorithm>
#include <cstdint>
#include <vector>

namespace llaisys::runtime {

// Belongs to one thread; keeps its scratch from row to row. May throw std::bad_alloc.
class Candidates {
public:
    // All of logits [vocab], which must outlive the row and are never written to.
    void begin(const float *logits, int64_t vocab);

    // The best n of a row, in any order; ids are distinct.
    void begin_best(const int32_t *ids, const float *logits, int64_t n);

    // In the order of ids: logit x()[i] of token id_of(i), 0 <= i < size().
    int64_t size() const { return n_; }
    const float *x() const { return x_; }
    const int32_t *ids() const { return ids_; } // null as long as nothing was cut off: id_of(i) = i
    int32_t id_of(int64_t i) const { return ids_ == nullptr ? int32_t(i) : ids_[i]; }
    float temperature() const { return temperature_; } // still to be applied to x()
    void set_temperature(float temperature) { temperature_ = temperature; }

    float *own_x(); // the logits, to be changed
    void apply_mask(const uint32_t *mask);

    // Fills weights() as weigh() does; returns their sum, 0 when every logit is -inf.
    double weigh();
    const float *weights() const { return weights_.data(); }
    const double *block_sums() const { return block_sums_.data(); }

    // Memory for a link; the contents are its own.
    std::vector<Candidate> &selected() { return selected_; }
    float *scores(); // [size()]

    void keep_selected(); // what is left is selected(), which must be in the order of ids
    // What is left are the indices with score[i] >= floor for which keep(i) holds. score: [size()],
    // may be x().
    template <typename Keep> void keep_where(const float *score, float floor, const Keep &keep);

private:
    template <typename T> static void grow(std::vector<T> *values, int64_t n) {
        if (int64_t(values->size()) < n) {
            values->resize(size_t(n));
        }
    }

    const float *x_ = nullptr;
    const int32_t *ids_ = nullptr;
    int64_t n_ = 0;
    float temperature_ = 1;

    // Grow-only; x_ and ids_ point into the first two once they differ from the caller's row.
    std::vector<float> own_;
    std::vector<int32_t> own_ids_;
    std::vector<float> weights_;
    std::vector<double> block_sums_;
    std::vector<float> scores_;
    std::vector<Candidate> selected_;
};

template <typename Keep>
void Candidates::keep_where(const float *score, float floor, const Keep &keep) {
    grow(&own_, n_); // neither grows when x_ is in it already
    grow(&own_ids_, n_);
    constexpr int64_t kSkip = 64; // blocks without a survivor are passed over
    int64_t kept = 0;
    for (int64_t begin = 0; begin < n_; begin += kSkip) {
        const int64_t end = std::min(n_, begin + kSkip);
        if (max_of(score + begin, end - begin) < floor) {
            continue;
        }
        for (int64_t i = begin; i < end; ++i) { // in place: kept <= i
            if (score[i] >= floor && keep(i)) {
                own_ids_[size_t(kept)] = id_of(i);
                own_[size_t(kept)] = x_[i];
                ++kept;
            }
        }
    }
    x_ = own_.data();
    ids_ = own_ids_.data();
    n_ = kept;
}

} // namespace llaisys::runtime
