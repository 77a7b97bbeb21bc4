// Sampling arithmetic with bitwise identical results on CPU and GPU: every operation is rounded
// once, in the order written.
#pragma once

#include "base/dtype.hpp"

#include <limits>

#if defined(__CUDACC__)
#define LLAISYS_HOST_DEVICE __host__ __device__ __forceinline__
#else
#define LLAISYS_HOST_DEVICE inline
#endif

namespace llaisys::sampling {

#if defined(__CUDA_ARCH__) // prevents fusion of a * b + c into one FMA
__device__ __forceinline__ float add(float a, float b) { return __fadd_rn(a, b); }
__device__ __forceinline__ float subtract(float a, float b) { return __fsub_rn(a, b); }
__device__ __forceinline__ float multiply(float a, float b) { return __fmul_rn(a, b); }
__device__ __forceinline__ float divide(float a, float b) { return __fdiv_rn(a, b); }
__device__ __forceinline__ uint32_t bits(float x) { return __float_as_uint(x); }
__device__ __forceinline__ float of_bits(uint32_t x) { return __uint_as_float(x); }
#else // -ffp-contract=off
LLAISYS_HOST_DEVICE float add(float a, float b) { return a + b; }
LLAISYS_HOST_DEVICE float subtract(float a, float b) { return a - b; }
LLAISYS_HOST_DEVICE float multiply(float a, float b) { return a * b; }
LLAISYS_HOST_DEVICE float divide(float a, float b) { return a / b; }
inline uint32_t bits(float x) { return bits_of(x); }
inline float of_bits(uint32_t x) { return float_of(x); }
#endif

constexpr float kInfinity = std::numeric_limits<float>::infinity();

// e^x for x <= 0, within 2.4e-7 relative; exactly 1 for 0, exactly 0 below -87 and for NaN. It is
// 2^n * e^r with n = round(x / ln 2) and |r| <= ln(2) / 2; the polynomial is Cephes' expf.
LLAISYS_HOST_DEVICE float exp_of(float x) {
    const float shifted =
        add(multiply(x, 1.44269504f), 12582912.0f); // 1.5 * 2^23: n is the low bits
    const float n = subtract(shifted, 12582912.0f);
    const float r = add(subtract(x, multiply(n, 0.693359375f)), multiply(n, 2.12194440e-4f));
    float p = 1.9875691500e-4f;
    p = add(multiply(p, r), 1.3981999507e-3f);
    p = add(multiply(p, r), 8.3334519073e-3f);
    p = add(multiply(p, r), 4.1665795894e-2f);
    p = add(multiply(p, r), 1.6666665459e-1f);
    p = add(multiply(p, r), 5.0000001201e-1f);
    const float e = add(add(multiply(multiply(p, r), r), r), 1.0f);
    const float scaled = multiply(e, of_bits((bits(shifted) << 23) + 0x3F800000u));
    return of_bits(bits(scaled) &
                   (0u - uint32_t(x >= -87.0f))); // branchless, so that loops vectorize
}

// Unnormalised probability of a logit, relative to the largest, max, which is not -inf. With max =
// +inf, each +inf has weight 1, others 0.
LLAISYS_HOST_DEVICE float weight_of(float logit, float max, float temperature) {
    if (max == kInfinity) {
        return logit == max ? 1.0f : 0.0f;
    }
    const float distance = subtract(logit, max);
    return exp_of(temperature == 1.0f ? distance : divide(distance, temperature));
}

// Bins of find_cutoff by distance from the largest logit: 32 per factor of e; the last holds weights
// below e^-32.
constexpr int kCutoffBins = 1024;
LLAISYS_HOST_DEVICE int cutoff_bin(float logit, float max, float temperature) {
    const float distance = logit == max ? 0.0f : divide(subtract(max, logit), temperature);
    const float bin = multiply(distance, 32.0f);
    return bin < float(kCutoffBins - 1) ? int(bin) : kCutoffBins - 1;
}

// Applies penalties to the logit of a token of the history that was sampled `sampled` times.
LLAISYS_HOST_DEVICE float penalised(float x, int32_t sampled, float repetition, float presence,
                                    float frequency) {
    x = x > 0 ? divide(x, repetition) : multiply(x, repetition);
    x = subtract(x, multiply(frequency, float(sampled)));
    return sampled > 0 ? subtract(x, presence) : x;
}

// Weights are summed in double precision, block by block; see sum_block in runner/sampler_math.cpp.
constexpr int64_t kBlock = 512;
constexpr int kLanes = 8; // of a block: value i is in lane i % 8

} // namespace llaisys::sampling
