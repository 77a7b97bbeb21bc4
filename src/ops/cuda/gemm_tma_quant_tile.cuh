// Consumer of gemm_tma_quant.cuh: products of one K tile by a warpgroup.
#pragma once

#include "ops/cuda/gemm_tma_quant_config.cuh"
#include "ops/cuda/wgmma.cuh"

namespace llaisys::ops::cuda {

// Consumer, one warpgroup: sums += scaled w * x^T over one K tile.
//   w_at     codes of the four atoms of the warpgroup (f8)
//   codes    rows of the own atom (int4)
//   params   of the own row in both groups
template <QuantCodes Codes, int Columns> struct QuantTile {
    static constexpr int kSums = Columns / 2;
    static constexpr int kBuffers = Columns <= 32 ? 2 : 1;

    // s and m of the rows of both groups.
    struct Scales {
        float low_s, high_s, low_m, high_m;
    };
    static __device__ __forceinline__ Scales scales(uint32_t low, uint32_t high) {
        return {__uint_as_float(low << 16), __uint_as_float(high << 16),
                __uint_as_float(low & 0xffff0000u), __uint_as_float(high & 0xffff0000u)};
    }

    static __device__ __forceinline__ void add_f8(float (&sums)[kSums], uint32_t w_at,
                                                  uint32_t x_at, uint32_t plane_bytes, int planes,
                                                  float low_s, float high_s) {
        float group[kSums];
        const uint64_t w = k_major_descriptor(w_at);
        const uint64_t x = k_major_descriptor(x_at);
        const uint64_t lo = k_major_descriptor(x_at + plane_bytes);
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < 4; ++k) { // advance 32 bytes each
            WgmmaE4m3::k_major(group, w + uint64_t(k * 2), x + uint64_t(k * 2), k > 0);
        }
        if (planes == 2) {
#pragma unroll
            for (int k = 0; k < 4; ++k) {
                WgmmaE4m3::k_major(group, w + uint64_t(k * 2), lo + uint64_t(k * 2), 1);
            }
        }
        wgmma_commit_group();
        wgmma_wait_group<0>();
        fence_operands(group);
#pragma unroll
        for (int i = 0; i < kSums; ++i) {
            sums[i] = fmaf(group[i], i % 4 < 2 ? low_s : high_s, sums[i]);
        }
    }

    // Steps of 32 values, or of 16 when groups have 16: half of the operand is zero.
    static __device__ __forceinline__ void
    add_int8(float (&sums)[kSums], const unsigned char *codes, const unsigned char *low_params,
             const unsigned char *high_params, int param_bytes, int group_shift, int values,
             uint32_t x_at, uint32_t plane_bytes, const float *x_sums) {
        const int lane = threadIdx.x % kWarpSize;
        const int g = lane / 4;
        const int step_shift = min(group_shift, 5);
        const int steps = int(kQuantTileBytes) >> step_shift;
#pragma unroll 1
        for (int step = 0; step < steps; ++step) {
            const int value = step << step_shift;
            if (value >= values) {
                break; // past the end of k
            }
            const int k = value / 32; // operand
            const auto word = [&](int chunk, int group) {
                return *reinterpret_cast<const uint32_t *>(codes +
                                                           (group * 8 + g) * int(kTmaRowBytes) +
                                                           ((chunk ^ g) << 4) + lane % 4 * 4);
            };
            const uint32_t w[4] = {word(2 * k, 0), word(2 * k, 1), word(2 * k + 1, 0),
                                   word(2 * k + 1, 1)};
            uint32_t high[4], low[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const bool is_used = step_shift == 5 || i / 2 == (step & 1);
                const uint32_t mask = is_used ? 0x0f0f0f0fu : 0u;
                high[i] = ((w[i] ^ 0x80808080u) >> 4) & mask;
                low[i] = w[i] & mask;
            }
            float of_high[kSums], of_low[kSums];
            const uint64_t x = k_major_descriptor(x_at + uint32_t(k * 32));
            const uint64_t rest = x + uint64_t(plane_bytes >> 4);
            wgmma_fence();
            WgmmaE4m3::k_major(of_high, high, x, 0);
            WgmmaE4m3::k_major(of_low, low, x, 0);
            WgmmaE4m3::k_major(of_high, high, rest, 1);
            WgmmaE4m3::k_major(of_low, low, rest, 1);
            wgmma_commit_group();
            const int at = value >> group_shift;
            const Scales s = scales(load_params(low_params, at, param_bytes).bits,
                                    load_params(high_params, at, param_bytes).bits);
            const float low_m = fmaf(s.low_s, -128.0f, s.low_m);
            const float high_m = fmaf(s.high_s, -128.0f, s.high_m);
            wgmma_wait_group<0>();
            fence_operands(of_high);
            fence_operands(of_low);
#pragma unroll
            for (int i = 0; i < kSums; ++i) {
                const int column = i / 4 * 8 + lane % 4 * 2 + i % 2;
                const float sum = fmaf(of_high[i], 16.0f, of_low[i]);
                const bool is_low = i % 4 < 2;
                sums[i] = fmaf(x_sums[column * steps + step], is_low ? low_m : high_m, sums[i]);
                sums[i] = fmaf(sum, is_low ? s.low_s : s.high_s, sums[i]);
            }
        }
    }

    // Steps of 32 values; two are in flight with two buffers.
    static __device__ __forceinline__ void
    add_int4(float (&sums)[kSums], const unsigned char *codes, const unsigned char *low_params,
             const unsigned char *high_params, int group_shift, int steps, uint32_t x_at,
             uint32_t plane_bytes, const float *x_sums) {
        constexpr int kSteps = kQuantTileBytes / 16;
        const int lane = threadIdx.x % kWarpSize;
        const int g = lane / 4;
        float group[kBuffers][kSums];
        const auto issue = [&](int step, float (&into)[kSums]) {
            const auto *from = reinterpret_cast<const uint32_t *>(codes + g * kTmaRowBytes +
                                                                  ((step ^ g) << 4) + lane % 4 * 4);
            const uint32_t low = from[0], high = from[8 * kTmaRowBytes / 4];
            const uint32_t a[4] = {low & 0x0f0f0f0fu, high & 0x0f0f0f0fu, low >> 4 & 0x0f0f0f0fu,
                                   high >> 4 & 0x0f0f0f0fu};
            // Two TMA tiles of 128 values per plane.
            const uint64_t x = k_major_descriptor(
                x_at + uint32_t(step / 4 * Columns) * kTmaRowBytes + uint32_t(step % 4 * 32));
            wgmma_fence();
            WgmmaE4m3::k_major(into, a, x, 0);
            WgmmaE4m3::k_major(into, a, x + uint64_t(plane_bytes >> 4), 1);
            wgmma_commit_group();
        };
        const auto add = [&](int step, float (&from)[kSums]) {
            fence_operands(from);
            const int at = step * 32 >> group_shift;
            const auto word = [&](const unsigned char *params) {
                return step < steps ? reinterpret_cast<const uint32_t *>(params)[at] : 0u;
            };
            const Scales s = scales(word(low_params), word(high_params));
#pragma unroll
            for (int j = 0; j < Columns / 8; ++j) {
#pragma unroll
                for (int c = 0; c < 2; ++c) {
                    const float x = x_sums[(8 * j + lane % 4 * 2 + c) * kSteps + step];
                    float &low = sums[4 * j + c], &high = sums[4 * j + 2 + c];
                    low = fmaf(from[4 * j + c], s.low_s, fmaf(x, s.low_m, low));
                    high = fmaf(from[4 * j + 2 + c], s.high_s, fmaf(x, s.high_m, high));
                }
            }
        };
        if constexpr (kBuffers == 1) {
#pragma unroll
            for (int step = 0; step < kSteps; ++step) {
                issue(step, group[0]);
                wgmma_wait_group<0>();
                add(step, group[0]);
            }
        } else {
            issue(0, group[0]);
#pragma unroll
            for (int step = 1; step < kSteps; ++step) {
                issue(step, group[step % kBuffers]);
                wgmma_wait_group<1>();
                add(step - 1, group[(step - 1) % kBuffers]);
            }
            wgmma_wait_group<0>();
            add(kSteps - 1, group[(kSteps - 1) % kBuffers]);
        }
    }
};

} // namespace llaisys::ops::cuda
