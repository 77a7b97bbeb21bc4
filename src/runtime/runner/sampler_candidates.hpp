// The remaining tokens of a row while the sampler chain runs.
#pragma once

#include "runtime/runner/sampler_math.hpp"

#include <algorithm>
#include <cstdint>
#include <vector>

namespace llaisys::runtime {

// Used by one thread; reuses its scratch for all rows. May throw std::bad_alloc.
class Candidates {
public:
    // Starts with all of logits [vocab], which must stay valid and are not written.
    void begin(const float *logits, int64_t vocab);

    // Sorted by id: logit x()[i] of token id_of(i), 0 <= i < size().
    int64_t size() const { return n_; }
    const float *x() const { return x_; }
    const int32_t *ids() const { return ids_; } // null while no token was removed: id_of(i) = i
    int32_t id_of(int64_t i) const { return ids_ == nullptr ? int32_t(i) : ids_[i]; }
    float temperature() const { return temperature_; } // not yet applied to x()
    void set_temperature(float temperature) { temperature_ = temperature; }

    float *mutable_x(); // a writable copy of the logits
    void apply_mask(const uint32_t *mask);

    // Computes weights() by softmax_weights(); returns their sum, 0 when every logit is -inf.
    double compute_weights();
    const float *weights() const { return weights_.data(); }
    const double *block_sums() const { return block_sums_.data(); }

    // Scratch for one logits processor.
    std::vector<Candidate> &selected() { return selected_; }
    float *scores(); // [size()]

    void keep_selected(); // keeps only selected(), which must be sorted by id
    // Keeps the indices with score[i] >= floor and keep(i). score: [size()], may be x().
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

    // Grow-only. x_ and ids_ point into the first two once they differ from the caller's row.
    std::vector<float> own_;
    std::vector<int32_t> own_ids_;
    std::vector<float> weights_;
    std::vector<double> block_sums_;
    std::vector<float> scores_;
    std::vector<Candidate> selected_;
};

template <typename Keep>
void Candidates::keep_where(const float *score, float floor, const Keep &keep) {
    grow(&own_, n_); // no reallocation when x_ points into it
    grow(&own_ids_, n_);
    constexpr int64_t kSkip = 64; // blocks without a kept token are skipped
    int64_t n_kept = 0;
    for (int64_t begin = 0; begin < n_; begin += kSkip) {
        const int64_t end = std::min(n_, begin + kSkip);
        if (max_of(score + begin, end - begin) < floor) {
            continue;
        }
        for (int64_t i = begin; i < end; ++i) { // in place: n_kept <= i
            if (score[i] >= floor && keep(i)) {
                own_ids_[size_t(n_kept)] = id_of(i);
                own_[size_t(n_kept)] = x_[i];
                ++n_kept;
            }
        }
    }
    x_ = own_.data();
    ids_ = own_ids_.data();
    n_ = n_kept;
}

} // namespace llaisys::runtime
