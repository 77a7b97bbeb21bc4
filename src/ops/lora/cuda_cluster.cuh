// LoRA by one kernel, for the few rows of a decode step: a cluster of blocks takes a tile of 16
// rows. Each block sums x * A over its share of the input and stores the sums in every block of the
// cluster (st.async); then each warp of the cluster adds B t to its share of the outputs.
//
// Bound by latency, so loads are issued as early as their addresses are known: B with A, the outputs
// while the sums travel. The order of summation differs from that of cuda_two_kernels.cuh. Compute
// capability 9.
#pragma once

#include "ops/cuda/cluster.cuh"
#include "ops/lora/cuda_tiles.cuh"

namespace llaisys::ops::cuda {

constexpr int kLoraCluster = 8;
constexpr int kLoraClusterRanks = 192; // largest n_parts * max_rank

template <int ColumnTiles> constexpr int kLoraClusterStride = 8 * ColumnTiles + 4;
// Shared memory: sums of each warp, then the sums of each block of the cluster.
template <int ColumnTiles> size_t lora_cluster_bytes(int n_columns) {
    return sizeof(float) * kLoraMmaRows *
           (kLoraWarps * kLoraClusterStride<ColumnTiles> + kLoraCluster * n_columns);
}

// Part and first output of a chunk of outputs when those of all parts are counted one after another;
// part -1: none.
__device__ __forceinline__ int2 lora_chunk(const LoraArgs &args, int chunk, int outputs) {
    for (int p = 0; p < args.n_parts; ++p) {
        const int own = (args.parts[p].n + outputs - 1) / outputs;
        if (chunk < own) {
            return make_int2(p, chunk * outputs);
        }
        chunk -= own;
    }
    return make_int2(-1, 0);
}

// ColumnTiles: of 8 ranks, summed at a time. Blocks: of the input, loaded at a time by a warp.
template <typename T, int ColumnTiles, int Blocks>
__global__ void __launch_bounds__(kLoraThreads, 2)
    lora_cluster_kernel(const __grid_constant__ LoraArgs args) {
    using Outputs = LoraWarpOutputs<T, 8>;
    constexpr int kColumns = 8 * ColumnTiles;
    constexpr int kStride = kLoraClusterStride<ColumnTiles>;
    extern __shared__ __align__(16) float lora_memory[];
    __shared__ __align__(8) uint64_t received_barrier;
    float *sums = lora_memory;                                           // [warps][16][kStride]
    float *received = lora_memory + kLoraWarps * kLoraMmaRows * kStride; // [blocks][16][n_columns]
    const int warp = threadIdx.x / kWarpSize, lane = threadIdx.x % kWarpSize;
    const int g = lane / 4, q = lane % 4;
    const int block = int(cluster_ctarank());
    const int n_tiles = args.n_adapter_tiles();
    const LoraTile tile = args.tile(blockIdx.x / kLoraCluster);
    LoraWait wait;
    if (int(blockIdx.x) / kLoraCluster >= n_tiles) { // all blocks of the cluster
        wait();
        return;
    }
    const int n_columns = args.n_parts * tile.rank;
    const uint32_t barrier = smem_address(&received_barrier);
    if (threadIdx.x == 0) {
        mbarrier_init(barrier, 1);
        fence_mbarrier_init();
        mbarrier_arrive_expect_tx(barrier, kLoraCluster * kLoraMmaRows * n_columns *
                                               uint32_t(sizeof(float)));
    }
    barrier_cluster_arrive_relaxed();
    bool is_cluster_ready = false;

    const bool has_low = g < tile.count, has_high = g + 8 < tile.count;
    const int64_t low_row = args.rows[tile.first + (has_low ? g : 0)];
    const int64_t high_row = args.rows[tile.first + (has_high ? g + 8 : 0)];
    // Warps of all blocks take turns: a product with few outputs still uses every block.
    int chunk = warp * kLoraCluster + block;
    int2 place = lora_chunk(args, chunk, Outputs::kOutputs);
    typename Outputs::Weights b = {};
    if (place.x >= 0) {
        Outputs(args, args.parts[place.x], tile.slot, place.y).load(0, b);
    }
    const int n_blocks = (args.k + kLoraBlockK - 1) / kLoraBlockK;
    const int first_block = n_blocks * block / kLoraCluster;
    const int last_block = n_blocks * (block + 1) / kLoraCluster;
    const T *x_low = static_cast<const T *>(args.x.data) + low_row * args.ldx + 8 * q;
    const T *x_high = static_cast<const T *>(args.x.data) + high_row * args.ldx + 8 * q;
    for (int column = 0; column < n_columns; column += kColumns) {
        float acc[ColumnTiles][4] = {};
        for (int first = first_block + warp * Blocks; first < last_block;
             first += kLoraWarps * Blocks) {
            uint4 low[Blocks], high[Blocks], a[ColumnTiles][Blocks];
#pragma unroll
            for (int c = 0; c < ColumnTiles; ++c) {
                const T *from = lora_a<T>(args, tile, column / 8 + c);
#pragma unroll
                for (int i = 0; i < Blocks; ++i) {
                    const int k = (first + i) * kLoraBlockK;
                    a[c][i] = load_16_or_zero(from + k, from != nullptr && first + i < last_block &&
                                                            k + 8 * q < args.k);
                }
            }
            wait();
#pragma unroll
            for (int i = 0; i < Blocks; ++i) {
                const int k = (first + i) * kLoraBlockK;
                const bool is_inside = first + i < last_block && k + 8 * q < args.k;
                low[i] = load_16_or_zero(x_low + k, is_inside && has_low);
                high[i] = load_16_or_zero(x_high + k, is_inside && has_high);
            }
#pragma unroll
            for (int i = 0; i < Blocks; ++i) {
#pragma unroll
                for (int c = 0; c < ColumnTiles; ++c) {
                    lora_shrink_mma<T>(acc[c], low[i], high[i], a[c][i]);
                }
            }
        }
#pragma unroll
        for (int c = 0; c < ColumnTiles; ++c) {
            float *row = sums + (warp * kLoraMmaRows + g) * kStride + 8 * c + 2 * q;
            *reinterpret_cast<float2 *>(row) = make_float2(acc[c][0], acc[c][1]);
            row += 8 * kStride;
            *reinterpret_cast<float2 *>(row) = make_float2(acc[c][2], acc[c][3]);
        }
        __syncthreads();
        if (!is_cluster_ready) {
            barrier_cluster_wait(); // every block has initialized its barrier
            is_cluster_ready = true;
        }
        for (int i = threadIdx.x; i < kLoraMmaRows * kColumns / 4; i += kLoraThreads) {
            const int row = i / (kColumns / 4), c = i % (kColumns / 4) * 4;
            if (column + c >= n_columns) {
                continue;
            }
            float4 sum = make_float4(0, 0, 0, 0);
#pragma unroll
            for (int w = 0; w < kLoraWarps; ++w) {
                add_4(sum, *reinterpret_cast<const float4 *>(
                               sums + (w * kLoraMmaRows + row) * kStride + c));
            }
            const uint32_t to =
                smem_address(received + (block * kLoraMmaRows + row) * n_columns + column + c);
#pragma unroll
            for (int other = 0; other < kLoraCluster; ++other) {
                st_async(mapa(to, other), sum, mapa(barrier, other));
            }
        }
        __syncthreads();
    }
    wait(); // warps without a block of the input
    bool is_received = false;
    while (place.x >= 0) {
        const LoraKernelPart &part = args.parts[place.x];
        const Outputs outputs(args, part, tile.slot, place.y);
        const bool is_f32 = part.out.dtype == LLAISYS_DTYPE_F32;
        const float scale = part.scale(tile.slot);
        Vector8 before[2][Outputs::kVectors] = {};
        const auto is_valid = [&](int half, int v) {
            return (half == 0 ? has_low : has_high) && outputs.first + 8 * v < part.n;
        };
        const auto index = [&](int half, int v) {
            return (half == 0 ? low_row : high_row) * part.ldo + outputs.first + 8 * v;
        };
#pragma unroll
        for (int half = 0; half < 2; ++half) {
#pragma unroll
            for (int v = 0; v < Outputs::kVectors; ++v) {
                if (is_valid(half, v)) {
                    before[half][v] = load_vector_8(part.out, index(half, v));
                }
            }
        }
        if (!is_received) {
            mbarrier_wait_parity_cluster(barrier, 0);
            is_received = true;
        }
        typename Outputs::Sums added = {};
        for (int r = 0; r < tile.rank; r += kLoraRankStep) {
            if (r > 0) {
                outputs.load(r, b);
            }
            const float *t = received + g * n_columns + place.x * tile.rank + r + 4 * q;
            float4 low = make_float4(0, 0, 0, 0), high = low;
#pragma unroll
            for (int other = 0; other < kLoraCluster; ++other) {
                const float *from = t + other * kLoraMmaRows * n_columns;
                add_4(low, *reinterpret_cast<const float4 *>(from));
                add_4(high, *reinterpret_cast<const float4 *>(from + 8 * n_columns));
            }
            uint32_t operand[4];
            lora_operand<T>(scale, low, high, operand);
            Outputs::multiply(operand, b, added);
        }
#pragma unroll
        for (int half = 0; half < 2; ++half) {
#pragma unroll
            for (int v = 0; v < Outputs::kVectors; ++v) {
                if (!is_valid(half, v) || scale == 0.0f) {
                    continue;
                }
                float values[8], delta[8];
                unpack_8<T>(before[half][v], is_f32, values);
                Outputs::values(added, half, v, delta);
#pragma unroll
                for (int i = 0; i < 8; ++i) {
                    values[i] += delta[i];
                }
                store_8<T>(part.out, index(half, v), values);
            }
        }
        chunk += kLoraWarps * kLoraCluster;
        place = lora_chunk(args, chunk, Outputs::kOutputs);
        if (place.x >= 0) {
            Outputs(args, args.parts[place.x], tile.slot, place.y).load(0, b);
        }
    }
    if (!is_received) { // no block may exit while others store to its shared memory
        mbarrier_wait_parity_cluster(barrier, 0);
    }
}

} // namespace llaisys::ops::cuda
