// Rows of x that a block of gemm_tma_quant.cuh quantises itself.
#pragma once

#include "ops/cuda/gemm_tma_quant_config.cuh"
#include "ops/cuda/mbarrier.cuh"
#include "ops/cuda/wgmma.cuh"

namespace llaisys::ops::cuda {

// Normalizes and quantises the values [first, first + count) of the rows of x into shared memory;
// by the consumer threads. Zeros past the end of k. scratch: 2 floats per warp, then the scales of
// the rows. The layout is that of a pipeline stage, K tile after K tile.
template <QuantCodes Codes, bool Norms, int Columns>
__device__ __forceinline__ void keep_quant_rows(const GemmInput &in, const QuantTmaConfig &shape,
                                                unsigned char *shared, float *scratch, int first,
                                                int count, int n_warps) {
    constexpr int kTile = quant_tile_values(Codes);
    constexpr uint32_t kPlane = uint32_t(kTile / 128 * Columns) * kTmaRowBytes;
    const int lane = threadIdx.x % kWarpSize;
    const int warp = threadIdx.x / kWarpSize;
    const int team_warps = max(1, n_warps / in.m);
    const int teams = n_warps / team_warps;
    const int team = warp / team_warps;
    const int own = warp % team_warps * kWarpSize + lane; // thread of the team
    const int team_threads = team_warps * kWarpSize;
    const int begin = first / 8, end = min(first + count, in.k) / 8;
    for (int base = 0; base < in.m; base += teams) {
        const int row = base + team;
        const bool is_used = team < teams && row < in.m;
        float squares = 0, largest = 0;
        for (int at = (Norms ? 0 : begin) + own; is_used && at < (Norms ? in.k / 8 : end);
             at += team_threads) {
            float values[8];
            load_8<bf16, Norms>(in, row, at, values, &squares);
            if (at >= begin && at < end) {
#pragma unroll
                for (int i = 0; i < 8; ++i) {
                    largest = fmaxf(largest, fabsf(values[i]));
                }
            }
        }
        squares = warp_sum(squares);
        largest = warp_max(largest);
        if (lane == 0) {
            scratch[2 * warp] = squares;
            scratch[2 * warp + 1] = largest;
        }
        named_barrier_sync_group(0, n_warps * kWarpSize);
        if (is_used) {
            squares = 0;
            for (int w = team * team_warps; w < (team + 1) * team_warps; ++w) {
                squares += scratch[2 * w];
                largest = fmaxf(largest, scratch[2 * w + 1]);
            }
            const float factor = Norms ? 1.0f / sqrtf(squares / float(in.k) + in.epsilon) : 1.0f;
            const float inverse = largest > 0 ? 448.0f / largest : 0.0f;
            if (own == 0) {
                scratch[2 * kM96MaxAtoms + row] = largest / 448.0f * factor;
            }
            // Whole warps: all lanes take part in the sums.
            for (int from = begin + own - lane; from < (first + count) / 8; from += team_threads) {
                const int at = from + lane;
                float values[8] = {};
                if (at < end) {
                    load_8<bf16, Norms>(in, row, at, values, &squares);
                }
                uint32_t words[2][2];
                float sum = e4m3_words(values, inverse, words);
                const int value = at * 8 - first;
                const int tile = value / kTile;
                const int in_tile = value % kTile;
                const bool is_inside = value < count;
                if constexpr (Codes != QuantCodes::f8) {
                    const int step_values = kTile / (shape.x_sums_row / 4);
                    sum += __shfl_xor_sync(kFullMask, sum, 1);
                    sum += step_values == 32 ? __shfl_xor_sync(kFullMask, sum, 2) : 0.0f;
                    if (is_inside && value % step_values == 0) {
                        reinterpret_cast<float *>(
                            shared + shape.kept_sums_at +
                            uint32_t(tile * Columns + row) *
                                uint32_t(shape.x_sums_row))[in_tile / step_values] = sum * 0x1p-9f;
                    }
                }
                unsigned char *to = shared + shape.kept_at + uint32_t(tile) * 2 * kPlane +
                                    uint32_t(in_tile / 128 * Columns) * kTmaRowBytes;
                for (int p = 0; p < 2 && is_inside; ++p) {
                    const int byte = in_tile % 128;
                    unsigned char *plane = to + uint32_t(p) * kPlane;
                    *reinterpret_cast<uint2 *>(plane + swizzle_128b(row, byte / 16) + byte % 16) =
                        make_uint2(words[p][0], words[p][1]);
                }
            }
        }
        if (base + teams < in.m) {
            named_barrier_sync_group(0, n_warps * kWarpSize); // scratch is read
        }
    }
    fence_proxy_async();
    named_barrier_sync_group(0, n_warps * kWarpSize);
}

} // namespace llaisys::ops::cuda
