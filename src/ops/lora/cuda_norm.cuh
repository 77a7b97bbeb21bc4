// RMS norm between two LoRA products of a decoder layer: residual += B t of the product before, the
// norm, and t = A x of the products that read the normalized rows.
//
// A cluster of blocks takes 16 rows of a tile; a block has a share of the columns, in registers from
// the first load to the last store, in the operand layout of both products
// (ops/cuda/lora_tiles.cuh). Blocks exchange the sums of squares through distributed shared memory
// and store one term of t each. Bound by latency; each value is read and written once. Compute
// capability 9.
#pragma once

#include "ops/cuda/cluster.cuh"
#include "ops/cuda/lora_tiles.cuh"

namespace llaisys::ops::cuda {

constexpr int kLoraCluster = int(kLoraNormSplits);
// Largest input: blocks of 32 columns per warp.
constexpr int kLoraNormMaxBlocks = 4;
constexpr int kLoraNormColumns = kLoraCluster * kLoraWarps * kLoraBlockK; // per block of a warp

struct LoraNormArgs {
    // The product before; n_parts 0: none. x null: t is the sum of stored terms, otherwise A x.
    LoraArgs before;
    LoraArgs next; // A of n_parts; terms are stored
    float *residual;
    int64_t ld_residual;
    void *normed;
    int64_t ld_normed;
    Reals weight; // f32 or T
    float epsilon;
    int tile_parts; // 16-row parts of a tile
};

// Terms of t = A x of 16 rows, one per block of the cluster, in the shared memory of every block. x
// is divided over the blocks; `barrier` completes when all terms have arrived.
template <typename T, typename Terms, typename Sums>
__device__ __forceinline__ void
lora_cluster_shrink(const LoraArgs &args, const LoraTile &tile, const bool (&has_row)[2],
                    const int64_t (&row)[2], Terms &terms, Sums &sums, uint32_t barrier) {
    const int warp = threadIdx.x / kWarpSize, q = threadIdx.x % 4;
    const int block = int(cluster_ctarank());
    const int n_blocks = (args.k + kLoraBlockK - 1) / kLoraBlockK;
    const int first = n_blocks * block / kLoraCluster + warp;
    const int last = n_blocks * (block + 1) / kLoraCluster;
    const T *x = static_cast<const T *>(args.x.data) + 8 * q;
    for (int r = 0; r < tile.rank; r += kLoraRankStep) {
        const T *a = lora_a<T>(args, tile, r / 8), *high_a = lora_a<T>(args, tile, r / 8 + 1);
        float acc[2][4] = {};
#pragma unroll 2
        for (int i = first; i < last; i += kLoraWarps) {
            const int k = i * kLoraBlockK;
            const bool is_inside = k + 8 * q < args.k;
            const uint4 low = load_16_or_zero(x + row[0] * args.ldx + k, is_inside && has_row[0]);
            const uint4 high = load_16_or_zero(x + row[1] * args.ldx + k, is_inside && has_row[1]);
            lora_shrink_mma<T>(acc[0], low, high, load_16_or_zero(a + k, is_inside));
            lora_shrink_mma<T>(acc[1], low, high, load_16_or_zero(high_a + k, is_inside));
        }
        sums.put(acc[0], 0);
        sums.put(acc[1], 1);
        __syncthreads();
        const int i = threadIdx.x / kLoraRankStep, c = threadIdx.x % kLoraRankStep;
        const float sum = sums.get(i, c);
        const uint32_t to =
            smem_address(terms.sums + (block * kLoraMmaRows + i) * tile.rank + r + c);
#pragma unroll
        for (int other = 0; other < kLoraCluster; ++other) {
            st_async(mapa(to, other), sum, mapa(barrier, other));
        }
        __syncthreads();
    }
    mbarrier_wait_parity_cluster(barrier, 0);
}

// Blocks: of 32 columns, per warp.
template <typename T, int Blocks>
__global__ void __launch_bounds__(kLoraThreads, Blocks <= 2 ? 2 : 1)
    lora_norm_kernel(const __grid_constant__ LoraNormArgs args) {
#if __CUDA_ARCH__ >= 900
    using Outputs = LoraWarpOutputs<T, 4>;
    __shared__ LoraTileTerms<kLoraCluster *int(kLoraInputRank) / int(kLoraFusedRank)> terms;
    __shared__ LoraWarpSums<kLoraColumnTiles> sums;
    __shared__ float squares[kLoraWarps][kLoraMmaRows];
    __shared__ float received[kLoraCluster][kLoraMmaRows]; // squares of each block
    __shared__ __align__(8) uint64_t received_barrier, terms_barrier;
    const LoraArgs &before = args.before, &next = args.next;
    const int warp = threadIdx.x / kWarpSize, lane = threadIdx.x % kWarpSize;
    const int g = lane / 4, q = lane % 4;
    const int rank_in_cluster = int(cluster_ctarank());
    const int item = blockIdx.x / kLoraCluster;
    LoraWait wait;
    const LoraTile tile = next.tile(item / args.tile_parts);
    const int at = item % args.tile_parts * kLoraMmaRows;
    if (at >= tile.count) { // all blocks of the cluster
        wait();
        return;
    }
    const uint32_t barrier = smem_address(&received_barrier);
    if (threadIdx.x == 0) {
        mbarrier_init(barrier, 1);
        mbarrier_init(smem_address(&terms_barrier), 1);
        fence_mbarrier_init();
        mbarrier_arrive_expect_tx(barrier, sizeof received);
        mbarrier_arrive_expect_tx(smem_address(&terms_barrier),
                                  kLoraCluster * kLoraMmaRows * tile.rank * sizeof(float));
    }
    barrier_cluster_arrive_relaxed();

    const bool has_row[2] = {at + g < tile.count, at + g + 8 < tile.count};
    int64_t row[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        row[half] = next.rows[tile.first + at + (has_row[half] ? g + 8 * half : 0)];
    }
    const int k = next.k;
    const int n_blocks = (k + kLoraBlockK - 1) / kLoraBlockK;
    const int first_block = n_blocks * rank_in_cluster / kLoraCluster + warp;
    const int last_block = n_blocks * (rank_in_cluster + 1) / kLoraCluster;
    int column[Blocks]; // of the lane; -1: none
#pragma unroll
    for (int i = 0; i < Blocks; ++i) {
        const int block = first_block + i * kLoraWarps;
        column[i] = block * kLoraBlockK + 8 * q;
        column[i] = block < last_block && column[i] < k ? column[i] : -1;
    }
    const LoraKernelPart &part = before.parts[0];
    const bool has_before = before.n_parts > 0 && tile.slot >= 0;
    const float scale = has_before ? part.scale(tile.slot) : 0.0f;
    const auto outputs = [&](int i) {
        return Outputs(before, part, tile.slot, (first_block + i * kLoraWarps) * kLoraBlockK);
    };
    typename Outputs::Weights b[Blocks];
    if (has_before) { // not scale: its load would come first
#pragma unroll
        for (int i = 0; i < Blocks; ++i) {
            outputs(i).load(0, b[i]);
        }
    }
    const int n_columns = tile.slot >= 0 ? next.n_parts * tile.rank : 0;
    const auto load_a = [&](int first_tile, uint4(&a)[kLoraColumnTiles][Blocks]) {
#pragma unroll
        for (int c = 0; c < kLoraColumnTiles; ++c) {
            const T *from = lora_a<T>(next, tile, first_tile + c);
#pragma unroll
            for (int i = 0; i < Blocks; ++i) {
                const bool is_valid = from != nullptr && column[i] >= 0;
                a[c][i] = load_16_or_zero(from + column[i] - 8 * q, is_valid);
            }
        }
    };
    if (n_columns > 0) { // into L2
#pragma unroll
        for (int c = 0; c < kLoraColumnTiles; ++c) {
            const T *from = lora_a<T>(next, tile, c);
#pragma unroll
            for (int i = 0; i < Blocks; ++i) {
                if (q == 0 && from != nullptr && column[i] >= 0) {
                    prefetch_l2(from + column[i]);
                }
            }
        }
    }
    const bool has_input = before.x.data != nullptr;
    if (has_before && has_input) {
        barrier_cluster_wait(); // every block has initialized its barriers
    }
    wait();
    float x[Blocks][2][8];
#pragma unroll
    for (int i = 0; i < Blocks; ++i) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const float *from = args.residual + row[half] * args.ld_residual + max(column[i], 0);
            const bool is_valid = has_row[half] && column[i] >= 0;
            const uint4 low = load_16_or_zero(from, is_valid);
            const uint4 high = load_16_or_zero(from + 4, is_valid);
            unpack_8<T>({low, high}, true, x[i][half]);
        }
    }
    if (scale != 0.0f) { // the same for all threads of the cluster
        int n_groups = kLoraCluster;
        if (has_input) {
            lora_cluster_shrink<T>(before, tile, has_row, row, terms, sums,
                                   smem_address(&terms_barrier));
        } else {
            n_groups = terms.groups(tile.rank);
            terms.load(before, tile, at);
            __syncthreads();
        }
#pragma unroll
        for (int i = 0; i < Blocks; ++i) {
            typename Outputs::Sums added = {};
            for (int r = 0; r < tile.rank; r += kLoraRankStep) {
                if (r > 0) {
                    outputs(i).load(r, b[i]);
                }
                uint32_t operand[4];
                terms.template operand<T>(tile.rank, r, scale, operand, n_groups);
                Outputs::multiply(operand, b[i], added);
            }
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                float delta[8];
                Outputs::values(added, half, 0, delta);
#pragma unroll
                for (int j = 0; j < 8; ++j) {
                    x[i][half][j] += delta[j];
                }
                if (has_row[half] && column[i] >= 0) {
                    store_8<T>({args.residual, LLAISYS_DTYPE_F32},
                               row[half] * args.ld_residual + column[i], x[i][half]);
                }
            }
        }
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        float sum = 0;
#pragma unroll
        for (int i = 0; i < Blocks; ++i) {
#pragma unroll
            for (int j = 0; j < 8; ++j) {
                sum += column[i] >= 0 ? x[i][half][j] * x[i][half][j] : 0.0f;
            }
        }
        sum += __shfl_xor_sync(kFullMask, sum, 1);
        sum += __shfl_xor_sync(kFullMask, sum, 2);
        if (q == 0) {
            squares[warp][g + 8 * half] = sum;
        }
    }
    uint4 a[kLoraColumnTiles][Blocks];
    Vector8 weight[Blocks];
#pragma unroll
    for (int i = 0; i < Blocks; ++i) {
        weight[i] = load_vector_8(args.weight, max(column[i], 0));
    }
    if (n_columns > 0) {
        load_a(0, a);
    }
    __syncthreads();
    if (!(has_before && has_input)) {
        barrier_cluster_wait();
    }
    if (threadIdx.x < kLoraMmaRows * kLoraCluster) {
        const int to = threadIdx.x / kLoraMmaRows, i = threadIdx.x % kLoraMmaRows;
        float sum = 0;
#pragma unroll
        for (int w = 0; w < kLoraWarps; ++w) {
            sum += squares[w][i];
        }
        st_async(mapa(smem_address(&received[rank_in_cluster][i]), to), sum, mapa(barrier, to));
    }
    mbarrier_wait_parity_cluster(barrier, 0);
    uint4 normed[2][Blocks];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        float sum = 0;
#pragma unroll
        for (int i = 0; i < kLoraCluster; ++i) {
            sum += received[i][g + 8 * half];
        }
        const float factor = 1.0f / sqrtf(sum / float(k) + args.epsilon);
#pragma unroll
        for (int i = 0; i < Blocks; ++i) {
            float scales[8];
            unpack_8<T>(weight[i], args.weight.dtype == LLAISYS_DTYPE_F32, scales);
#pragma unroll
            for (int j = 0; j < 8; ++j) {
                x[i][half][j] *= factor * scales[j];
            }
            normed[half][i] = column[i] >= 0 ? pack_8<T>(x[i][half]) : make_uint4(0, 0, 0, 0);
            if (has_row[half] && column[i] >= 0) {
                *reinterpret_cast<uint4 *>(static_cast<T *>(args.normed) +
                                           row[half] * args.ld_normed + column[i]) =
                    normed[half][i];
            }
        }
    }
    for (int first = 0; first < n_columns; first += 8 * kLoraColumnTiles) {
        if (first > 0) {
            load_a(first / 8, a);
        }
        float acc[kLoraColumnTiles][4] = {};
#pragma unroll
        for (int i = 0; i < Blocks; ++i) {
#pragma unroll
            for (int c = 0; c < kLoraColumnTiles; ++c) {
                lora_shrink_mma<T>(acc[c], normed[0][i], normed[1][i], a[c][i]);
            }
        }
        sums.store(next, tile, at, rank_in_cluster, first, acc);
    }
#endif
}

} // namespace llaisys::ops::cuda
