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

// Maximum, or sum, over the lanes of all keys of a head.
__device__ __forceinline__ float max_of_keys(float x) {
    x = fmaxf(x, __shfl_xor_sync(kFullMask, x, 4));
    x = fmaxf(x, __shfl_xor_sync(kFullMask, x, 8));
    return fmaxf(x, __shfl_xor_sync(kFullMask, x, 16));
}
__device__ __forceinline__ float sum_of_keys(float x) {
    x += __shfl_xor_sync(kFullMask, x, 4);
    x += __shfl_xor_sync(kFullMask, x, 8);
    return x + __shfl_xor_sync(kFullMask, x, 16);
}

// Maximum, sum and unnormalized output of one warp, and its queries.
template <int D, int HeadTiles> struct DecodeSums {
    static constexpr int kSteps = D / 16;
    float out[HeadTiles][kSteps][4] = {};
    float max[HeadTiles][2];
    float sum[HeadTiles][2] = {};
    uint32_t q[HeadTiles][kSteps][2];

    __device__ __forceinline__ DecodeSums() {
        for (int h = 0; h < HeadTiles; ++h) {
            max[h][0] = max[h][1] = -INFINITY;
        }
    }
};

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

template <typename T, typename Format, int D, int HeadTiles>
struct DecodeByteState : DecodeSums<D, HeadTiles> {
    using Tile = DecodeByteTile<D>;
    using Sums = DecodeSums<D, HeadTiles>;
    using Sums::kSteps, Sums::out, Sums::max, Sums::sum, Sums::q;

    float unit = 0;     // of out: the largest scale of a value so far
    float per_unit = 0; // 1 / unit

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

    __device__ __forceinline__ void add(uint32_t tile, int first, int begin, int end, float scale,
                                        float cap_scale) {
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
        const bool is_capped = cap_scale != 0;
        const float low_key = load_shared_f32(scales) * (is_capped ? 1.0f : scale);
        const float high_key = load_shared_f32(scales + 8 * 4) * (is_capped ? 1.0f : scale);
        const float low_value = load_shared_f32(scales + kDecodeKeys * 4);
        const float high_value = load_shared_f32(scales + (kDecodeKeys + 8) * 4);
        const int low = first + lane / 4; // this lane's keys: low and low + 8
        const bool sees_low = low >= begin && low < end;
        const bool sees_high = low + 8 >= begin && low + 8 < end;
        bool has_larger = fmaxf(low_value, high_value) > unit;
#pragma unroll
        for (int h = 0; h < HeadTiles; ++h) {
#pragma unroll
            for (int c = 0; c < 2; ++c) {
                float low_score = scores[h][c] * low_key;
                float high_score = scores[h][c + 2] * high_key;
                if (is_capped) {
                    low_score = soft_capped(low_score, cap_scale) * scale;
                    high_score = soft_capped(high_score, cap_scale) * scale;
                }
                scores[h][c] = sees_low ? low_score : -INFINITY;
                scores[h][c + 2] = sees_high ? high_score : -INFINITY;
                has_larger = has_larger || fmaxf(scores[h][c], scores[h][c + 2]) > max[h][c];
            }
        }
        if (__any_sync(kFullMask, has_larger)) { // the first tiles of a sequence, then rarely
            rescale(scores, fmaxf(low_value, high_value));
        }
        const float low_weight = low_value * per_unit;
        const float high_weight = high_value * per_unit;
        uint32_t p[HeadTiles][2];
#pragma unroll
        for (int h = 0; h < HeadTiles; ++h) {
            float weights[4];
#pragma unroll
            for (int c = 0; c < 2; ++c) {
                const float safe = max[h][c] == -INFINITY ? 0.0f : max[h][c];
                weights[c] = ex2_approx_ftz(scores[h][c] - safe);
                weights[c + 2] = ex2_approx_ftz(scores[h][c + 2] - safe);
                sum[h][c] += weights[c] + weights[c + 2];
                weights[c] *= low_weight;
                weights[c + 2] *= high_weight;
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

private:
    // Raises maximum and unit to those of a tile and rescales the sums. value_scale: the larger of
    // this lane's two.
    __device__ __forceinline__ void rescale(const float (&scores)[HeadTiles][4],
                                            float value_scale) {
        const float unit_now = fmaxf(unit, max_of_keys(value_scale));
        per_unit = unit_now > 0 ? 1.0f / unit_now : 0.0f;
        const float unit_factor = unit * per_unit;
        unit = unit_now;
#pragma unroll
        for (int h = 0; h < HeadTiles; ++h) {
#pragma unroll
            for (int c = 0; c < 2; ++c) {
                const float now =
                    fmaxf(max[h][c], max_of_keys(fmaxf(scores[h][c], scores[h][c + 2])));
                const float factor = ex2_approx_ftz(max[h][c] - (now == -INFINITY ? 0.0f : now));
                sum[h][c] *= factor;
                max[h][c] = now;
#pragma unroll
                for (int d = 0; d < kSteps; ++d) {
                    out[h][d][c] *= factor * unit_factor;
                    out[h][d][c + 2] *= factor * unit_factor;
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
