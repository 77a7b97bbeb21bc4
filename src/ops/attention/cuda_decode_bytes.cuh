// Tiles and softmax state of decode attention (cuda_decode.cuh) over 8-bit keys and values.
//
// A tile has 16 rows of D bytes of keys, the same of values, and their scales. Fragments of 16-bit
// pairs of bytes are converted to f16 in registers and multiplied in f16; the scale of a key
// multiplies its scores, that of a value the probability. Probabilities are f16: they are relative
// to the largest scale of a value so far, which `unit` holds and a rescale of the output follows,
// as for the maximum of the scores.
//
// A fragment of keys has the dimensions 4t to 4t + 3 of a group of 16 in lane t % 4 where a
// fragment of 16-bit keys has 2t, 2t + 1, 2t + 8 and 2t + 9; the queries are loaded in the same
// order. Transposed values have the dimensions 2g and 2g + 1 in rows g and g + 8.
#pragma once

#include "ops/attention/cuda_args.cuh"
#include "ops/cuda/kv_bytes.cuh"

namespace llaisys::ops::cuda {

constexpr int kDecodeKeys = 16; // per tile

template <typename Cache, int D> struct DecodeTile;
template <typename T, typename Cache, int D, int HeadTiles> struct DecodeState;

template <int D> struct DecodeByteTile {
    static constexpr int kChunks = D / 16; // 16-byte chunks per row
    static constexpr uint32_t kRowBytes = (D + 127) / 128 * 128;
    static constexpr uint32_t kValues = kDecodeKeys * kRowBytes; // offset of the values
    static constexpr uint32_t kScales = 2 * kValues; // offset of f32 [keys and values, kDecodeKeys]
    static constexpr uint32_t kBytes = kScales + 2 * kDecodeKeys * 4;
    static __device__ __forceinline__ uint32_t offset(int row, int chunk) {
        return uint32_t(row) * kRowBytes + (uint32_t(chunk ^ (row & 7)) << 4);
    }
};
template <int D> struct DecodeTile<E4m3, D> : DecodeByteTile<D> {};
template <int D> struct DecodeTile<Int8, D> : DecodeByteTile<D> {};

__device__ __forceinline__ float load_shared_f32(uint32_t address) {
    float value;
    asm volatile("ld.shared.f32 %0, [%1];" : "=f"(value) : "r"(address));
    return value;
}

// Two adjacent 16-bit values as f16.
template <typename T> __device__ __forceinline__ uint32_t pair_to_f16(uint32_t pair) {
    if constexpr (std::is_same_v<T, f16>) {
        return pair;
    } else {
        return pack_pair<f16>(__uint_as_float(pair << 16), __uint_as_float(pair & 0xffff0000u));
    }
}

template <typename T, typename Format, int D, int HeadTiles> struct DecodeByteState {
    using Tile = DecodeByteTile<D>;
    static constexpr int kSteps = D / 16;

    float out[HeadTiles][kSteps][4] = {};
    float max[HeadTiles][2];
    float sum[HeadTiles][2] = {};
    float unit = 0; // of out: the largest scale of a value so far
    uint32_t q[HeadTiles][kSteps][2];

    __device__ __forceinline__ DecodeByteState() {
        for (int h = 0; h < HeadTiles; ++h) {
            max[h][0] = max[h][1] = -INFINITY;
        }
    }

    __device__ __forceinline__ void load_queries(const T *query, int64_t q_head, int group) {
        const int lane = threadIdx.x % kWarpSize;
#pragma unroll
        for (int h = 0; h < HeadTiles; ++h) {
            const int head = h * 8 + lane / 4;
            const T *from = query + int64_t(head) * q_head + lane % 4 * 4;
#pragma unroll
            for (int step = 0; step < kSteps; ++step) {
                const uint2 values = head < group
                                         ? *reinterpret_cast<const uint2 *>(from + step * 16)
                                         : make_uint2(0, 0);
                q[h][step][0] = pair_to_f16<T>(values.x);
                q[h][step][1] = pair_to_f16<T>(values.y);
            }
        }
    }
    static __device__ __forceinline__ int low_dim(int d) {
        return d * 16 + int(threadIdx.x) % kWarpSize / 4 * 2;
    }
    static __device__ __forceinline__ int high_dim(int d) { return low_dim(d) + 1; }

    __device__ __forceinline__ void add(uint32_t tile, int first, int begin, int end, float scale) {
        const int lane = threadIdx.x % kWarpSize;
        // Of the ldmatrix row of this lane: matrices 1 and 3 are keys 8 to 15, 2 and 3 the next
        // chunk.
        const int row = (lane / 8 & 1) * 8 + lane % 8;
        const int next = lane / 16;
        float scores[HeadTiles][4] = {};
#pragma unroll
        for (int step = 0; step < kSteps; step += 2) {
            uint32_t raw[4];
            ldmatrix_x4(raw, tile + Tile::offset(row, min(step + next, kSteps - 1)));
#pragma unroll
            for (int s = 0; s < 2 && step + s < kSteps; ++s) {
                uint32_t a[4];
                Format::to_f16(raw[2 * s], &a[0], &a[2]);
                Format::to_f16(raw[2 * s + 1], &a[1], &a[3]);
#pragma unroll
                for (int h = 0; h < HeadTiles; ++h) {
                    mma_m16n8k16<f16>(scores[h], a, q[h][step + s][0], q[h][step + s][1]);
                }
            }
        }
        const uint32_t scales = tile + Tile::kScales + uint32_t(lane / 4) * 4;
        const float low_key = load_shared_f32(scales) * scale;
        const float high_key = load_shared_f32(scales + 8 * 4) * scale;
        const float low_value = load_shared_f32(scales + kDecodeKeys * 4);
        const float high_value = load_shared_f32(scales + (kDecodeKeys + 8) * 4);
        float largest = fmaxf(low_value, high_value);
        largest = fmaxf(largest, __shfl_xor_sync(kFullMask, largest, 4));
        largest = fmaxf(largest, __shfl_xor_sync(kFullMask, largest, 8));
        largest = fmaxf(largest, __shfl_xor_sync(kFullMask, largest, 16));
        const float unit_now = fmaxf(unit, largest);
        const float per_unit = unit_now > 0 ? 1.0f / unit_now : 0.0f;
        const float unit_rescale = unit * per_unit;
        unit = unit_now;

        const int low = first + lane / 4; // this lane's keys: low and low + 8
        const bool sees_low = low >= begin && low < end;
        const bool sees_high = low + 8 >= begin && low + 8 < end;
        uint32_t p[HeadTiles][2];
#pragma unroll
        for (int h = 0; h < HeadTiles; ++h) {
            float weights[4];
#pragma unroll
            for (int c = 0; c < 2; ++c) {
                const float s0 = sees_low ? scores[h][c] * low_key : -INFINITY;
                const float s1 = sees_high ? scores[h][c + 2] * high_key : -INFINITY;
                float top = fmaxf(s0, s1);
                top = fmaxf(top, __shfl_xor_sync(kFullMask, top, 4));
                top = fmaxf(top, __shfl_xor_sync(kFullMask, top, 8));
                top = fmaxf(top, __shfl_xor_sync(kFullMask, top, 16));
                const float now = fmaxf(max[h][c], top);
                const float safe = now == -INFINITY ? 0.0f : now;
                const float rescale = exp2f(max[h][c] - safe);
                weights[c] = exp2f(s0 - safe);
                weights[c + 2] = exp2f(s1 - safe);
                sum[h][c] = sum[h][c] * rescale + weights[c] + weights[c + 2];
                max[h][c] = now;
#pragma unroll
                for (int d = 0; d < kSteps; ++d) {
                    out[h][d][c] *= rescale * unit_rescale;
                    out[h][d][c + 2] *= rescale * unit_rescale;
                }
                weights[c] *= low_value * per_unit;
                weights[c + 2] *= high_value * per_unit;
            }
            p[h][0] = movmatrix_trans(pack_pair<f16>(weights[0], weights[1]));
            p[h][1] = movmatrix_trans(pack_pair<f16>(weights[2], weights[3]));
        }
#pragma unroll
        for (int step = 0; step < kSteps; step += 2) {
            uint32_t raw[4];
            ldmatrix_x4_trans(raw, tile + Tile::kValues +
                                       Tile::offset(row, min(step + next, kSteps - 1)));
#pragma unroll
            for (int s = 0; s < 2 && step + s < kSteps; ++s) {
                uint32_t a[4];
                Format::columns_to_f16(raw[2 * s], &a[0], &a[1]);
                Format::columns_to_f16(raw[2 * s + 1], &a[2], &a[3]);
#pragma unroll
                for (int h = 0; h < HeadTiles; ++h) {
                    mma_m16n8k16<f16>(out[h][step + s], a, p[h][0], p[h][1]);
                }
            }
        }
    }
};
template <typename T, int D, int HeadTiles>
struct DecodeState<T, E4m3, D, HeadTiles> : DecodeByteState<T, E4m3, D, HeadTiles> {};
template <typename T, int D, int HeadTiles>
struct DecodeState<T, Int8, D, HeadTiles> : DecodeByteState<T, Int8, D, HeadTiles> {};

} // namespace llaisys::ops::cuda
