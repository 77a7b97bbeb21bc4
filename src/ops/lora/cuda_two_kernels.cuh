// LoRA by two kernels:
//
//   shrink   t[split, i, part, r] = sum over one split of the input of x * A
//   expand   out += B (scale * sum over the splits of t)
//
// Work items are (tile, ..); the number of used tiles is read on the device, so that one captured
// graph serves any adapters. A split has a fixed size and order of summation: results are
// batch-invariant.
#pragma once

#include "ops/cuda/lora_tiles.cuh"

namespace llaisys::ops::cuda {

constexpr int kLoraExpandTiles = 4; // of 8 outputs, of one work item of expand

// Item of a block: one tile, one split, kLoraColumnTiles column tiles. Each warp sums kBlocks
// blocks.
template <typename T>
__global__ void __launch_bounds__(kLoraThreads, 1)
    lora_shrink_kernel(const __grid_constant__ LoraArgs args) {
    constexpr int kBlocks = kLoraSplit / (kLoraWarps * kLoraBlockK);
    __shared__ LoraWarpSums<kLoraColumnTiles> sums;
    LoraWait wait;
    const int warp = threadIdx.x / kWarpSize, lane = threadIdx.x % kWarpSize;
    const int g = lane / 4, q = lane % 4;
    const int items_per_tile = args.splits * args.column_blocks;
    const int n_items = args.n_adapter_tiles() * items_per_tile;
    for (int item = blockIdx.x; item < n_items; item += gridDim.x) {
        const LoraTile tile = args.tile(item / items_per_tile);
        const int split = item % args.splits;
        const int first_column = item / args.splits % args.column_blocks * kLoraColumnTiles;
        if (8 * first_column >= args.n_parts * tile.rank) {
            continue;
        }
        const int k0 = split * int(kLoraSplit) + warp * kBlocks * kLoraBlockK;
        uint4 weights[kLoraColumnTiles][kBlocks];
#pragma unroll
        for (int c = 0; c < kLoraColumnTiles; ++c) {
            const T *a = lora_a<T>(args, tile, first_column + c);
#pragma unroll
            for (int b = 0; b < kBlocks; ++b) {
                const int k = k0 + b * kLoraBlockK;
                weights[c][b] = load_16_or_zero(a + k, a != nullptr && k + 8 * q < args.k);
            }
        }
        for (int at = 0; at < tile.count; at += kLoraMmaRows) {
            float acc[kLoraColumnTiles][4] = {};
            uint4 low[kBlocks], high[kBlocks];
            const bool has_low = at + g < tile.count, has_high = at + g + 8 < tile.count;
            const int32_t *rows = args.rows + tile.first;
            const T *x = static_cast<const T *>(args.x.data) + 8 * q;
            const T *x_low = x + rows[has_low ? at + g : 0] * args.ldx;
            const T *x_high = x + rows[has_high ? at + g + 8 : 0] * args.ldx;
            wait();
#pragma unroll
            for (int b = 0; b < kBlocks; ++b) {
                const int k = k0 + b * kLoraBlockK;
                low[b] = load_16_or_zero(x_low + k, has_low && k + 8 * q < args.k);
                high[b] = load_16_or_zero(x_high + k, has_high && k + 8 * q < args.k);
            }
#pragma unroll
            for (int b = 0; b < kBlocks; ++b) {
#pragma unroll
                for (int c = 0; c < kLoraColumnTiles; ++c) {
                    lora_shrink_mma<T>(acc[c], low[b], high[b], weights[c][b]);
                }
            }
            sums.store(args, tile, at, split, 8 * first_column, acc);
        }
    }
    wait();
}

// Four ranks of one row, summed over the splits; zero for a row past the tile.
__device__ __forceinline__ float4 lora_sum_4(const LoraArgs &args, const LoraTile &tile, int part,
                                             int row, int r) {
    float4 sum = make_float4(0, 0, 0, 0);
    if (row < tile.count) {
        const float *t = args.sums(0, tile.first + row, part) + r;
        const int64_t stride = args.m * args.n_parts * args.max_rank;
#pragma unroll 8
        for (int s = 0; s < args.splits; ++s) {
            add_4(sum, *reinterpret_cast<const float4 *>(t + s * stride));
        }
    }
    return sum;
}

// sums += B t of 16 rows from index `at` of the tile on; weights: those of the first ranks.
template <typename T, int Tiles>
__device__ __forceinline__ void lora_multiply(const LoraArgs &args, const LoraTile &tile, int part,
                                              int at, float scale,
                                              const LoraWarpOutputs<T, Tiles> &outputs,
                                              typename LoraWarpOutputs<T, Tiles>::Weights &weights,
                                              typename LoraWarpOutputs<T, Tiles>::Sums &sums) {
    const int lane = threadIdx.x % kWarpSize, g = lane / 4, q = lane % 4;
    for (int r = 0; r < tile.rank; r += kLoraRankStep) {
        if (tile.rank > kLoraRankStep) {
            outputs.load(r, weights);
        }
        uint32_t operand[4];
        lora_operand<T>(scale, lora_sum_4(args, tile, part, at + g, r + 4 * q),
                        lora_sum_4(args, tile, part, at + g + 8, r + 4 * q), operand);
        outputs.multiply(operand, weights, sums);
    }
}

// Item of a warp: one tile, 8 * kLoraExpandTiles outputs of one part.
template <typename T>
__global__ void __launch_bounds__(kLoraThreads, 2)
    lora_expand_kernel(const __grid_constant__ LoraArgs args, int chunks) {
    using Outputs = LoraWarpOutputs<T, kLoraExpandTiles>;
    const int g = threadIdx.x % kWarpSize / 4;
    LoraWait wait;
    const int n_items = args.n_adapter_tiles() * chunks;
    const int n_warps = gridDim.x * kLoraWarps;
    for (int item = blockIdx.x * kLoraWarps + threadIdx.x / kWarpSize; item < n_items;
         item += n_warps) {
        const LoraTile tile = args.tile(item / chunks);
        int chunk = item % chunks, p = 0;
        for (; p + 1 < args.n_parts; ++p) {
            const int own = (args.parts[p].n + Outputs::kOutputs - 1) / Outputs::kOutputs;
            if (chunk < own) {
                break;
            }
            chunk -= own;
        }
        const LoraKernelPart &part = args.parts[p];
        const Outputs outputs(args, part, tile.slot, chunk * Outputs::kOutputs);
        typename Outputs::Weights weights;
        outputs.load(0, weights);
        const float scale = part.scale(tile.slot);
        if (scale == 0.0f) {
            continue;
        }
        const bool is_f32 = part.out.dtype == LLAISYS_DTYPE_F32;
        for (int at = 0; at < tile.count; at += kLoraMmaRows) {
            int64_t to[2];
            bool is_valid[2];
            Vector8 before[2] = {};
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const int row = at + g + 8 * half;
                is_valid[half] = row < tile.count && outputs.first < part.n;
                to[half] =
                    args.rows[tile.first + (row < tile.count ? row : 0)] * part.ldo + outputs.first;
            }
            wait();
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                if (is_valid[half]) {
                    before[half] = load_vector_8(part.out, to[half]);
                }
            }
            typename Outputs::Sums sums = {};
            lora_multiply<T, kLoraExpandTiles>(args, tile, p, at, scale, outputs, weights, sums);
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                if (!is_valid[half]) {
                    continue;
                }
                float values[8], added[8];
                unpack_8<T>(before[half], is_f32, values);
                Outputs::values(sums, half, 0, added);
#pragma unroll
                for (int i = 0; i < 8; ++i) {
                    values[i] += added[i];
                }
                store_8<T>(part.out, to[half], values);
            }
        }
    }
    wait();
}

} // namespace llaisys::ops::cuda
