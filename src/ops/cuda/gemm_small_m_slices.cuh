// Consumer of gemm_small_m_quant.cuh: products of one slice of a segment by a warp.
#pragma once

#include "ops/cuda/gemm_small_m_stages.cuh"

namespace llaisys::ops::cuda {

LLAISYS_HOST_DEVICE constexpr int quant_slice(QuantCodes codes) {
    return int(quant_segment(codes)) / kQuantWarps;
}

// mma.sync.aligned.m16n8k32 on signed bytes: d = a * b + c.
__device__ __forceinline__ void mma_m16n8k32_s8(int (&d)[4], const uint32_t (&a)[4], uint2 b,
                                                const int (&c)[4]) {
    asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
        "{%10,%11,%12,%13};"
        : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b.x), "r"(b.y), "r"(c[0]), "r"(c[1]),
          "r"(c[2]), "r"(c[3]));
}

// What a consumer warp reads of a stage, and of x.
struct QuantSlice {
    const unsigned char *low, *high;               // codes of the own row in both groups
    const unsigned char *low_params, *high_params; // of their groups
    const unsigned char *values;                   // of x, of the segment
    const float2 *scales;
    int param_bytes, m;
};

// acc[2 * tile + h] += weights of the own row (h: of both groups of rows) * x over Steps * 32 values
// from `first` on, for row tile * 4 + lane % 4 of x.
template <QuantCodes Codes, int Group, int Steps>
__device__ __forceinline__ void add_int_steps(float (&acc)[8], const QuantSlice &from, int first) {
    constexpr bool kIsInt4 = Codes == QuantCodes::int4;
    constexpr int kParts = Group == 16 ? 2 : 1; // groups per step
    constexpr int kSums = Group > 32 ? 1 : Steps * kParts;
    // A sum of 32 products of int4 is within 2^22; others are read in two parts.
    constexpr bool kIsShort = kIsInt4 && Group <= 32;
    const int lane = threadIdx.x % kWarpSize;
    const int g = lane / 4, t = lane % 4;
    uint32_t a[Steps][4];
#pragma unroll
    for (int s = 0; s < Steps; ++s) {
        if constexpr (kIsInt4) {
            const int at = first / 2 + s * 16 + t * 4;
            const uint32_t low = *reinterpret_cast<const uint32_t *>(from.low + at);
            const uint32_t high = *reinterpret_cast<const uint32_t *>(from.high + at);
            a[s][0] = low & 0x0f0f0f0fu;
            a[s][1] = high & 0x0f0f0f0fu;
            a[s][2] = low >> 4 & 0x0f0f0f0fu;
            a[s][3] = high >> 4 & 0x0f0f0f0fu;
        } else {
            const int at = first + s * 32 + t * 8;
            const uint2 low = *reinterpret_cast<const uint2 *>(from.low + at);
            const uint2 high = *reinterpret_cast<const uint2 *>(from.high + at);
            a[s][0] = low.x;
            a[s][1] = high.x;
            a[s][2] = low.y;
            a[s][3] = high.y;
        }
    }
    QuantParams low_params[kSums], high_params[kSums];
    if constexpr (kIsInt4 && Group == 32 && Steps == 4) { // 16 bytes
        const uint4 low = *reinterpret_cast<const uint4 *>(from.low_params + first / 8);
        const uint4 high = *reinterpret_cast<const uint4 *>(from.high_params + first / 8);
        low_params[0].bits = low.x;
        low_params[1].bits = low.y;
        low_params[2].bits = low.z;
        low_params[3].bits = low.w;
        high_params[0].bits = high.x;
        high_params[1].bits = high.y;
        high_params[2].bits = high.z;
        high_params[3].bits = high.w;
    } else {
#pragma unroll
        for (int i = 0; i < kSums; ++i) {
            const int param_bytes = kIsInt4 ? 4 : from.param_bytes;
            low_params[i] = load_params(from.low_params, first / Group + i, param_bytes);
            high_params[i] = load_params(from.high_params, first / Group + i, param_bytes);
        }
    }
    constexpr int kStart = kIsShort ? 0 : kMagicBits;
    constexpr int kGroup = Group > 32 ? quant_slice(Codes) : Group; // of x
#pragma unroll
    for (int tile = 0; tile < 4; ++tile) {
        if (tile * 4 >= from.m) {
            break;
        }
        // Sums of rows past the end are dropped.
        const int column_row = min(tile * 4 + g / 2, from.m - 1);
        const int own_row = min(tile * 4 + t, from.m - 1);
        const unsigned char *b_at =
            from.values + (first / 32 * from.m + column_row) * 64 + g % 2 * 32 + t * 8;
        const float2 *scale_at = from.scales + first / kGroup * from.m + own_row;
        int c[4] = {kStart, kMagicBits, kStart, kMagicBits};
#pragma unroll
        for (int s = 0; s < Steps; ++s) {
            const uint2 b = *reinterpret_cast<const uint2 *>(b_at + s * from.m * 64);
#pragma unroll
            for (int part = 0; part < kParts; ++part) {
                const bool is_used = kParts == 1 || t / 2 == part;
                const uint32_t own[4] = {is_used ? a[s][0] : 0, is_used ? a[s][1] : 0,
                                         is_used ? a[s][2] : 0, is_used ? a[s][3] : 0};
                int d[4];
                mma_m16n8k32_s8(d, own, b, c);
                if constexpr (Group > 32) {
                    c[0] = d[0];
                    c[1] = d[1];
                    c[2] = d[2];
                    c[3] = d[3];
                    if (s + 1 < Steps) {
                        continue;
                    }
                }
                const int at = Group > 32 ? 0 : s * kParts + part;
                const float2 scale = scale_at[at * from.m];
                float sums[2];
#pragma unroll
                for (int h = 0; h < 2; ++h) {
                    sums[h] = kIsShort ? __int_as_float(d[2 * h] * 64 + d[2 * h + 1]) - kMagic
                                       : fmaf(__int_as_float(d[2 * h]) - kMagic, 64.0f,
                                              __int_as_float(d[2 * h + 1]) - kMagic);
                }
                acc[2 * tile] = fmaf(sums[0], scale.x * low_params[at].s(),
                                     fmaf(low_params[at].m(), scale.y, acc[2 * tile]));
                acc[2 * tile + 1] = fmaf(sums[1], scale.x * high_params[at].s(),
                                         fmaf(high_params[at].m(), scale.y, acc[2 * tile + 1]));
            }
        }
    }
}

// The slice of a warp: `values` of the segment from `first` on, at most a slice.
template <QuantCodes Codes, int Group>
__device__ __forceinline__ void add_int_slice(float (&acc)[8], const QuantSlice &from, int first,
                                              int values) {
    constexpr int kSlice = quant_slice(Codes);
    if (Group > 32 || values >= kSlice) {
        add_int_steps<Codes, Group, kSlice / 32>(acc, from, first);
        return;
    }
    if constexpr (Group <= 32) {
#pragma unroll 1
        for (int at = 0; at < values; at += 32) {
            add_int_steps<Codes, Group, 1>(acc, from, first + at);
        }
    }
}

// Two e4m3 codes as a pair of f16.
__device__ __forceinline__ uint32_t halves_of(uint32_t codes) {
    const __half2_raw pair =
        __nv_cvt_fp8x2_to_halfraw2(__nv_fp8x2_storage_t(codes & 0xffffu), __NV_E4M3);
    return uint32_t(pair.x) | uint32_t(pair.y) << 16;
}

// acc[4 * tile + 2 * h + c] += weights of the own row * x over 64 values from `first` on, for row
// tile * 8 + lane % 4 * 2 + c of x.
__device__ __forceinline__ void add_f8_slice(float (&acc)[8], const QuantSlice &from, int first) {
    const int lane = threadIdx.x % kWarpSize;
    const int g = lane / 4, t = lane % 4;
    const uint4 low = *reinterpret_cast<const uint4 *>(from.low + first + t * 16);
    const uint4 high = *reinterpret_cast<const uint4 *>(from.high + first + t * 16);
    const float low_s = load_params(from.low_params, first / 128, from.param_bytes).s();
    const float high_s = load_params(from.high_params, first / 128, from.param_bytes).s();
    const uint32_t lows[4] = {low.x, low.y, low.z, low.w};
    const uint32_t highs[4] = {high.x, high.y, high.z, high.w};
    uint32_t a[4][4];
#pragma unroll
    for (int s = 0; s < 4; ++s) {
        a[s][0] = halves_of(lows[s]);
        a[s][1] = halves_of(highs[s]);
        a[s][2] = halves_of(lows[s] >> 16);
        a[s][3] = halves_of(highs[s] >> 16);
    }
#pragma unroll
    for (int tile = 0; tile < 2; ++tile) {
        if (tile * 8 >= from.m) {
            break;
        }
        // Sums of rows past the end are dropped.
        const int row = min(tile * 8 + g, from.m - 1);
        const unsigned char *x_at = from.values + (first / 64 * from.m + row) * 128;
        const uint4 x0 = *reinterpret_cast<const uint4 *>(x_at + ((2 * t) ^ (row & 1)) * 16);
        const uint4 x1 = *reinterpret_cast<const uint4 *>(x_at + ((2 * t + 1) ^ (row & 1)) * 16);
        float sums[2][4] = {}; // two chains
        mma_m16n8k16<f16>(sums[0], a[0], x0.x, x0.y);
        mma_m16n8k16<f16>(sums[1], a[1], x0.z, x0.w);
        mma_m16n8k16<f16>(sums[0], a[2], x1.x, x1.y);
        mma_m16n8k16<f16>(sums[1], a[3], x1.z, x1.w);
        const float2 *scale_at = from.scales + first / 64 * from.m;
#pragma unroll
        for (int c = 0; c < 2; ++c) {
            const float scale = scale_at[min(tile * 8 + t * 2 + c, from.m - 1)].x;
            acc[4 * tile + c] = fmaf(sums[0][c] + sums[1][c], scale * low_s, acc[4 * tile + c]);
            acc[4 * tile + 2 + c] =
                fmaf(sums[0][2 + c] + sums[1][2 + c], scale * high_s, acc[4 * tile + 2 + c]);
        }
    }
}

} // namespace llaisys::ops::cuda
