#include "runtime/runner/sampler_candidates.hpp"

#include <limits>

namespace llaisys::runtime {

namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();

} // namespace

void Candidates::begin(const float *logits, int64_t vocab) {
    x_ = logits;
    ids_ = nullptr;
    n_ = vocab;
    temperature_ = 1;
}

float *Candidates::mutable_x() {
    if (x_ != own_.data()) {
        grow(&own_, n_);
        std::copy(x_, x_ + n_, own_.begin());
        x_ = own_.data();
    }
    return own_.data();
}

void Candidates::apply_mask(const uint32_t *mask) {
    grow(&own_, n_);
    for (int64_t begin = 0; begin < n_; begin += 32) {
        const uint32_t allowed = mask[begin / 32];
        const int64_t end = std::min(n_, begin + 32);
        if (allowed == 0) {
            std::fill(own_.begin() + begin, own_.begin() + end, -kInf);
            continue;
        }
        for (int64_t i = begin; i < end; ++i) {
            own_[size_t(i)] = (allowed >> (i - begin) & 1u) != 0 ? x_[i] : -kInf;
        }
    }
    x_ = own_.data();
}

double Candidates::compute_weights() {
    grow(&weights_, n_);
    grow(&block_sums_, (n_ + kWeightBlock - 1) / kWeightBlock);
    const float max = max_of(x_, n_);
    if (max == -kInf) {
        std::fill(weights_.begin(), weights_.begin() + n_, 0.0f);
        return 0;
    }
    return softmax_weights(x_, n_, max, temperature_, weights_.data(), block_sums_.data());
}

float *Candidates::scores() {
    grow(&scores_, n_);
    return scores_.data();
}

void Candidates::keep_selected() {
    const int64_t n = int64_t(selected_.size());
    grow(&own_, n);
    grow(&own_ids_, n);
    for (int64_t i = 0; i < n; ++i) {
        own_[size_t(i)] = selected_[size_t(i)].logit;
        own_ids_[size_t(i)] = selected_[size_t(i)].id;
    }
    x_ = own_.data();
    ids_ = own_ids_.data();
    n_ = n;
}

} // namespace llaisys::runtime
