// A row of f32 values that a block reads: keys in the order of the values, and a loop with several
// loads in flight.
#pragma once

#include <cmath>
#include <cstdint>

namespace llaisys::ops::cuda {

// NaN is -inf, and both zeros have one key.
__device__ __forceinline__ uint32_t key_of(float x) {
    const uint32_t bits = __float_as_uint(x == x ? x + 0.0f : -INFINITY);
    return bits ^ (bits >> 31 != 0 ? 0xffffffffu : 0x80000000u);
}
__device__ __forceinline__ float value_of(uint32_t key) {
    return __uint_as_float(key ^ (key >> 31 != 0 ? 0x80000000u : 0xffffffffu));
}

// apply(row[i], i) for the values of this thread: one chunk of Threads values in `every`. The loads
// of Batch values come first: the compiler moves none across the atomics of `apply`.
template <int Threads, int Batch = 8, typename Apply>
__device__ __forceinline__ void for_each_value(const float *row, int64_t n, int every,
                                               const Apply &apply) {
    const int64_t step = int64_t(every) * Threads;
    for (int64_t first = threadIdx.x; first < n; first += Batch * step) {
        float values[Batch];
#pragma unroll
        for (int j = 0; j < Batch; ++j) {
            const int64_t i = first + j * step;
            values[j] = i < n ? row[i] : 0.0f;
        }
#pragma unroll
        for (int j = 0; j < Batch; ++j) {
            const int64_t i = first + j * step;
            if (i < n) {
                apply(values[j], i);
            }
        }
    }
}

} // namespace llaisys::ops::cuda
