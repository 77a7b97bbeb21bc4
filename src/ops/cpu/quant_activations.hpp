// A row of activations becomes bytes with a scale for every 32 of them, compiled per instruction set
// for bytes; included after simd_<isa>.hpp and bytes_<isa>.hpp.
#pragma once

#include "device/cpu/simd.hpp"
#include "ops/cpu/quant_kernels.hpp"

namespace llaisys::LLAISYS_CPU_NS {

using ops::cpu::kQuantGroup;
using ops::cpu::QuantRows;

inline void quantise_row(const QuantRows &out, int64_t row, const float *x) {
    constexpr int kVectors = int(kQuantGroup) / kLanes;
    for (int64_t group = 0; group < out.k / kQuantGroup; ++group, x += kQuantGroup) {
        int8_t *q = out.q + (group * out.stride + row) * kQuantGroup;
        vf largest = zero();
        vf tainted = zero(); // NaN as soon as one value is NaN or infinite
        for (int v = 0; v < kVectors; ++v) {
            const vf value = load(x + v * kLanes);
            largest = max_num(max_num(value, sub(zero(), value)), largest);
            tainted = fma(value, zero(), tainted);
        }
        const float bound = reduce_max(largest);
        const float inverse = bound > 0 ? 127.0f / bound : 0.0f;
        const float scale = bound / 127.0f + reduce_add(tainted);
        int32_t values[kQuantGroup];
        for (int v = 0; v < kVectors; ++v) {
            store_ints(values + v * kLanes, round_to_int(mul(load(x + v * kLanes), set1(inverse))));
        }
        int32_t first = 0;
        int32_t second = 0;
        for (int i = 0; i < 16; ++i) { // of what is kept: a NaN is any integer before
            first += int8_t(values[i]);
            second += int8_t(values[i + 16]);
        }
        for (int i = 0; i < 32; ++i) {
            q[i] = int8_t(values[i]);
        }
        const int32_t total = first + second;
        out.groups[group * out.stride + row] = {scale, -float(total), total, first, second};
    }
}

} // namespace llaisys::LLAISYS_CPU_NS
