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

    // s and m of a group as pairs of bf16 for decode().
    struct Pairs {
        __nv_bfloat162 s, m;
    };
    static __device__ __forceinline__ Pairs pairs_of(uint32_t bits) {
        // times 2^120 and 2^-13; an s of 0 becomes 2^-7, which is 0 beside the products
        return {pair_of<bf16>(__byte_perm(bits, bits, 0x1010) + 0x3c003c00u),
                __hmul2(pair_of<bf16>(__byte_perm(bits, bits, 0x3232)),
                        __float2bfloat162_rn(kQuantFactor<bf16>))};
    }
    // Codes in the lowest bits of both halves: the subnormal numbers q * 2^-133.
    static __device__ __forceinline__ uint32_t decode(uint32_t codes, const Pairs &pairs) {
        return bits_of_pair(__hfma2(pair_of<bf16>(codes & 0x000f000fu), pairs.s, pairs.m));
    }

    // Steps of 32 values, converted to bf16 times kQuantFactor in registers while the products of
    // the step before run.
    static __device__ __forceinline__ void
    add_int4(float (&sums)[kSums], const unsigned char *codes, const unsigned char *low_params,
             const unsigned char *high_params, int group_shift, int steps, uint32_t x_at) {
        constexpr int kSteps = kQuantTileBytes / 16;
        const int lane = threadIdx.x % kWarpSize;
        const int g = lane / 4;
        const int shift = lane % 4 * 4;
        uint32_t a[2][2][4]; // of two steps in flight
        const auto load = [&](int step, uint32_t (&to)[2][4]) {
            const unsigned char *from = codes + g * kTmaRowBytes + ((step ^ g) << 4);
            const uint4 low = *reinterpret_cast<const uint4 *>(from);
            const uint4 high = *reinterpret_cast<const uint4 *>(from + 8 * kTmaRowBytes);
            const int at = step * 32 >> group_shift;
            const auto word = [&](const unsigned char *params) {
                return step < steps ? reinterpret_cast<const uint32_t *>(params)[at] : 0u;
            };
            const Pairs of_low = pairs_of(word(low_params)), of_high = pairs_of(word(high_params));
            to[0][0] = decode(low.x >> shift, of_low);
            to[0][1] = decode(high.x >> shift, of_high);
            to[0][2] = decode(low.y >> shift, of_low);
            to[0][3] = decode(high.y >> shift, of_high);
            to[1][0] = decode(low.z >> shift, of_low);
            to[1][1] = decode(high.z >> shift, of_high);
            to[1][2] = decode(low.w >> shift, of_low);
            to[1][3] = decode(high.w >> shift, of_high);
        };
        load(0, a[0]);
#pragma unroll
        for (int step = 0; step < kSteps; ++step) {
            // TMA tiles of 64 values.
            const uint64_t x = k_major_descriptor(
                x_at + uint32_t(step / 2 * Columns) * kTmaRowBytes + uint32_t(step % 2 * 64));
            wgmma_fence();
            Wgmma<bf16>::k_major(sums, a[step % 2][0], x, 1);
            Wgmma<bf16>::k_major(sums, a[step % 2][1], x + 2, 1);
            wgmma_commit_group();
            if (step + 1 < kSteps) {
                wgmma_wait_group<1>();
                load(step + 1, a[(step + 1) % 2]);
            }
        }
        wgmma_wait_group<0>();
        fence_operands(sums);
    }
};

} // namespace llaisys::ops::cuda
