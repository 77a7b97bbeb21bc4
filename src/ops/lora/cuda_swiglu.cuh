// SwiGLU between the LoRA products of an MLP: h = silu(gate + B t) * (up + B t), and t = A h of the
// down projection.
//
// Block: 16 rows of a tile, kLoraSwigluSplit columns, which are one term of t. Everything a warp
// needs is loaded at once. Bound by memory: each value is read once, B and A once per 16 rows.
#pragma once

#include "ops/cuda/lora_tiles.cuh"

namespace llaisys::ops::cuda {

constexpr int kLoraSwigluBlocks = int(kLoraSwigluSplit) / (kLoraWarps * kLoraBlockK);

struct LoraSwigluArgs {
    LoraArgs gate_up; // B and terms of t; gate.out is replaced
    LoraArgs down;    // A; terms are stored; n_parts 0: none
    int tile_parts;   // 16-row parts of a tile
};

// swiglu() to about 4 ulp: the kernel is bound by instructions for many rows.
__device__ __forceinline__ float fast_swiglu(float gate, float up) {
    return up * __fdividef(gate, 1.0f + __expf(-gate));
}

template <typename T>
__global__ void __launch_bounds__(kLoraThreads, 2)
    lora_swiglu_kernel(const __grid_constant__ LoraSwigluArgs args) {
    using Outputs = LoraWarpOutputs<T, 4>;
    constexpr int kBlocks = kLoraSwigluBlocks;
    __shared__ LoraTileTerms<2> terms;
    __shared__ LoraWarpSums<2> sums;
    const LoraArgs &in = args.gate_up, &down = args.down;
    const LoraKernelPart &gate = in.parts[0], &up = in.parts[1];
    const int warp = threadIdx.x / kWarpSize, lane = threadIdx.x % kWarpSize;
    const int g = lane / 4, q = lane % 4;
    LoraWait wait;
    const LoraTile tile = in.tile(int(blockIdx.y) / args.tile_parts);
    const int at = int(blockIdx.y) % args.tile_parts * kLoraMmaRows;
    if (at >= tile.count) {
        wait();
        return;
    }
    const bool has_row[2] = {at + g < tile.count, at + g + 8 < tile.count};
    int64_t row[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        row[half] = in.rows[tile.first + at + (has_row[half] ? g + 8 * half : 0)];
    }
    const bool has_adapter = tile.slot >= 0;
    const float gate_scale = has_adapter ? gate.scale(tile.slot) : 0.0f;
    const float up_scale = has_adapter ? up.scale(tile.slot) : 0.0f;
    int first[kBlocks]; // column of the warp
    typename Outputs::Weights gate_b[kBlocks], up_b[kBlocks];
#pragma unroll
    for (int i = 0; i < kBlocks; ++i) {
        first[i] = (int(blockIdx.x) * kBlocks + i) * kLoraWarps * kLoraBlockK + warp * kLoraBlockK;
        if (has_adapter) {
            Outputs(in, gate, tile.slot, first[i]).load(0, gate_b[i]);
            Outputs(in, up, tile.slot, first[i]).load(0, up_b[i]);
        }
    }
    const bool has_down = has_adapter && down.n_parts > 0;
    const auto load_a = [&](int column_tile, int i) {
        const T *from = lora_a<T>(down, tile, column_tile);
        return load_16_or_zero(from + first[i], from != nullptr && first[i] + 8 * q < gate.n);
    };
    if (has_down && q == 0) {
#pragma unroll
        for (int i = 0; i < kBlocks; ++i) {
#pragma unroll
            for (int c = 0; c < 2; ++c) {
                if (first[i] < gate.n) {
                    prefetch_l2(lora_a<T>(down, tile, c) + first[i]);
                }
            }
        }
    }
    wait();
    uint4 gates[kBlocks][2], ups[kBlocks][2];
    const auto is_valid = [&](int i, int half) {
        return has_row[half] && first[i] + 8 * q < gate.n;
    };
#pragma unroll
    for (int i = 0; i < kBlocks; ++i) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int64_t column = first[i] + 8 * q;
            gates[i][half] = load_16_or_zero(static_cast<const T *>(gate.out.data) +
                                                 row[half] * gate.ldo + column,
                                             is_valid(i, half));
            ups[i][half] =
                load_16_or_zero(static_cast<const T *>(up.out.data) + row[half] * up.ldo + column,
                                is_valid(i, half));
        }
    }
    if (has_adapter) {
        terms.load(in, tile, at);
        __syncthreads();
    }
#pragma unroll
    for (int i = 0; i < kBlocks; ++i) {
        typename Outputs::Sums gate_added = {}, up_added = {};
        for (int r = 0; has_adapter && r < tile.rank; r += kLoraRankStep) {
            if (r > 0) {
                Outputs(in, gate, tile.slot, first[i]).load(r, gate_b[i]);
                Outputs(in, up, tile.slot, first[i]).load(r, up_b[i]);
            }
            uint32_t operand[4];
            terms.template operand<T>(2 * tile.rank, r, gate_scale, operand);
            Outputs::multiply(operand, gate_b[i], gate_added);
            terms.template operand<T>(2 * tile.rank, tile.rank + r, up_scale, operand);
            Outputs::multiply(operand, up_b[i], up_added);
        }
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            float values[8], up_values[8], gate_delta[8], up_delta[8];
            unpack_8<T>({gates[i][half], {}}, false, values);
            unpack_8<T>({ups[i][half], {}}, false, up_values);
            Outputs::values(gate_added, half, 0, gate_delta);
            Outputs::values(up_added, half, 0, up_delta);
#pragma unroll
            for (int j = 0; j < 8; ++j) {
                values[j] = fast_swiglu(values[j] + gate_delta[j], up_values[j] + up_delta[j]);
            }
            gates[i][half] = pack_8<T>(values);
            if (is_valid(i, half)) {
                *reinterpret_cast<uint4 *>(static_cast<T *>(gate.out.data) + row[half] * gate.ldo +
                                           first[i] + 8 * q) = gates[i][half];
            }
        }
    }
    for (int column = 0; has_down && column < tile.rank; column += 16) {
        float acc[2][4] = {};
#pragma unroll
        for (int i = 0; i < kBlocks; ++i) {
#pragma unroll
            for (int c = 0; c < 2; ++c) {
                lora_shrink_mma<T>(acc[c], gates[i][0], gates[i][1], load_a(column / 8 + c, i));
            }
        }
        sums.store(down, tile, at, int(blockIdx.x), column, acc);
    }
}

} // namespace llaisys::ops::cuda
