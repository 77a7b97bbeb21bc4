// Quantises a row of activations to bytes with one scale per 32 values; compiled per instruction
// set for bytes; included after simd_<isa>.hpp and bytes_<isa>.hpp.
#pragma once

#include "device/cpu/simd.hpp"
#include "ops/cpu/quant_kernels.hpp"

namespace llaisys::LLAISYS_CPU_NS {

using ops::cpu::kQuantGroup;
using ops::cpu::QuantGroup;
using ops::cpu::QuantRows;

constexpr int kGroupVectors = int(kQuantGroup) / kLanes;

// Largest of 32 magnitudes; `tainted` becomes NaN if one is NaN or infinite.
inline float group_bound(const float *x, vf *tainted) {
    vf largest = zero();
    for (int v = 0; v < kGroupVectors; ++v) {
        const vf value = load(x + v * kLanes);
        largest = max_num(max_num(value, sub(zero(), value)), largest);
        *tainted = fma(value, zero(), *tainted);
    }
    return reduce_max(largest);
}

// 32 values times `inverse` as bytes at q, and their group data.
inline QuantGroup quantise_group(int8_t *q, const float *x, float inverse, float scale) {
    for (int v = 0; v < kGroupVectors; ++v) {
        store(q + v * kLanes, mul(load(x + v * kLanes), set1(inverse)));
    }
    const int32_t first = sum_of_16(q);
    const int32_t rest = sum_of_16(q + 16);
    const int32_t total = first + rest;
    return {scale, -float(total), first, rest, kSumStart - 8 * total, kSumStart - 128 * total};
}

inline void quantise_row(const QuantRows &out, int64_t row, const float *x) {
    constexpr int64_t kAtOnce = 16; // groups interleaved to hide latency
    const int64_t groups = out.k / kQuantGroup;
    vf tainted = zero();
    for (int64_t first = 0; first < groups; first += kAtOnce) {
        const int64_t n = groups - first < kAtOnce ? groups - first : kAtOnce;
        float bound[kAtOnce];
        float inverse[kAtOnce];
        for (int64_t g = 0; g < n; ++g) {
            bound[g] = group_bound(x + (first + g) * kQuantGroup, &tainted);
        }
        for (int64_t g = 0; g < n; ++g) {
            inverse[g] = bound[g] > 0 ? 127.0f / bound[g] : 0.0f;
        }
        for (int64_t g = 0; g < n; ++g) {
            const int64_t at = out.at(row, first + g);
            out.groups[at] = quantise_group(out.q + at * kQuantGroup, x + (first + g) * kQuantGroup,
                                            inverse[g], bound[g] / 127.0f);
        }
    }
    if (groups > 0) {
        out.groups[out.at(row, 0)].scale += reduce_add(tainted); // zero, or NaN for the row
    }
}

} // namespace llaisys::LLAISYS_CPU_NS
