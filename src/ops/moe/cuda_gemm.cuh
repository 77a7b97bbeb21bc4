// Grouped GEMM over the experts (cp.async + mma.sync): out[pair] = W of the pair's expert * x of the
// pair, for pairs sorted by expert.
//
// A block computes 128 weight rows of one expert for a tile of TileN pairs. Weights are the A operand
// (16 rows per fragment), pairs the B operand, so that a tile may have as few as 8 pairs. The first
// product has 64 rows of gate and the same 64 of up; a warp holds 16 of each, applies the activation
// in registers and writes the hidden values. A pipeline stage is 64 values of k with the 128-byte
// swizzle. The sum over k is in the same order for every TileN: a pair's bits depend on that pair
// only.
//
// Each expert with pairs is read once per tile of its pairs; TileN follows the mean number of pairs,
// so that one tile is the rule. Bound: DRAM bandwidth for few pairs, mma.sync for many.
#pragma once

#include "ops/cuda/wgmma.cuh"
#include "ops/moe/cuda_args.cuh"

namespace llaisys::ops::cuda {

constexpr int kMoeWarps = 4;
constexpr int kMoeThreads = kMoeWarps * kWarpSize;
constexpr int kMoeTileM = 32 * kMoeWarps; // weight rows
constexpr int kMoeTileK = 64;
constexpr uint32_t kMoeRowBytes = kMoeTileK * 2;

__host__ __device__ constexpr int moe_stages(int tile_n) { return tile_n >= 128 ? 3 : 4; }
__host__ __device__ constexpr uint32_t moe_stage_bytes(int tile_n) {
    return uint32_t(kMoeTileM + tile_n) * kMoeRowBytes;
}
__host__ __device__ constexpr uint32_t moe_smem(int tile_n) {
    return 128 + uint32_t(moe_stages(tile_n)) * moe_stage_bytes(tile_n);
}

// Pairs [first, first + count) of the sorted list, all of one expert.
struct MoeTile {
    int expert; // negative: no such tile
    int first;
    int count;
};

// Tile `index` of the pairs; all lanes of a warp return the same.
template <int TileN>
__device__ __forceinline__ MoeTile find_moe_tile(const int32_t *offsets, int n_experts, int index) {
    const int lane = threadIdx.x % kWarpSize;
    const int each = (n_experts + kWarpSize - 1) / kWarpSize;
    const int begin = min(lane * each, n_experts), end = min(begin + each, n_experts);
    int tiles = 0;
    for (int e = begin; e < end; ++e) {
        tiles += (offsets[e + 1] - offsets[e] + TileN - 1) / TileN;
    }
    int before = tiles; // inclusive, then exclusive
#pragma unroll
    for (int step = 1; step < kWarpSize; step *= 2) {
        const int other = __shfl_up_sync(kFullMask, before, step);
        before += lane >= step ? other : 0;
    }
    before -= tiles;
    MoeTile tile{-1, 0, 0};
    const bool is_mine = index >= before && index < before + tiles;
    if (is_mine) {
        for (int e = begin; e < end; ++e) {
            const int first = offsets[e], pairs = offsets[e + 1] - first;
            const int here = (pairs + TileN - 1) / TileN;
            if (index < before + here) {
                const int start = (index - before) * TileN;
                tile = {e, first + start, min(TileN, pairs - start)};
                break;
            }
            before += here;
        }
    }
    const unsigned found = __ballot_sync(kFullMask, is_mine);
    const int source = found != 0 ? __ffs(int(found)) - 1 : 0;
    tile.expert = __shfl_sync(kFullMask, tile.expert, source);
    tile.first = __shfl_sync(kFullMask, tile.first, source);
    tile.count = __shfl_sync(kFullMask, tile.count, source);
    return tile;
}

// Writes the sums of a tile from output first_out on. staging: shared memory of TileN * (outputs + 8)
// values that no thread reads any more. Warps: of the block, 32 weight rows each.
template <typename T, int TileN, bool IsDown, int Warps = kMoeWarps>
__device__ __forceinline__ void store_moe_tile(const MoeArgs<T> &args, const MoeTile &tile,
                                               const float (&sums)[2][TileN / 8][4],
                                               unsigned char *staging, int first_out) {
    // Transpose through shared memory: [TileN][kTileOut], then rows of 16-byte units.
    constexpr int kTileOut = (IsDown ? 32 : 16) * Warps;
    constexpr int kNTiles = TileN / 8;
    constexpr int kStride = kTileOut + 8;
    const int32_t *pairs = args.sorted + args.n_experts + 1;
    const int warp = int(threadIdx.x) / kWarpSize, lane = int(threadIdx.x) % kWarpSize;
    const int n_out = IsDown ? args.hs : args.di;
    const int64_t expert_row = int64_t(tile.expert) * n_out;
    T *tile_out = reinterpret_cast<T *>(staging);
    const auto bias = [&](const Reals &values, int row) {
        const int output = first_out + row;
        return values.data != nullptr && output < n_out ? values.load(expert_row + output) : 0.0f;
    };
#pragma unroll
    for (int high = 0; high < 2; ++high) { // accumulator rows l / 4 and l / 4 + 8
        const int row = lane / 4 + 8 * high;
        const int out_row = IsDown ? warp * 32 + row : warp * 16 + row;
        const float first_bias = bias(IsDown ? args.down_bias : args.gate_bias, out_row);
        const float second_bias =
            IsDown ? bias(args.down_bias, out_row + 16) : bias(args.up_bias, out_row);
#pragma unroll
        for (int j = 0; j < kNTiles; ++j) {
#pragma unroll
            for (int c = 0; c < 2; ++c) {
                const int column = j * 8 + lane % 4 * 2 + c;
                const float first = sums[0][j][2 * high + c] + first_bias;
                const float second = sums[1][j][2 * high + c] + second_bias;
                if constexpr (IsDown) {
                    tile_out[column * kStride + out_row] = from_float<T>(first);
                    tile_out[column * kStride + out_row + 16] = from_float<T>(second);
                } else {
                    tile_out[column * kStride + out_row] =
                        from_float<T>(moe_activation(first, second, args.limit, args.alpha));
                }
            }
        }
    }
    __syncthreads();
    constexpr int kUnits = kTileOut / 8;
    for (int i = int(threadIdx.x); i < tile.count * kUnits; i += Warps * kWarpSize) {
        const int row = i / kUnits, column = i % kUnits * 8;
        if (first_out + column < n_out) {
            const int64_t to = IsDown ? pairs[tile.first + row] : tile.first + row;
            T *out = (IsDown ? args.expert_out : args.hidden) + to * n_out + first_out + column;
            *reinterpret_cast<uint4 *>(out) =
                *reinterpret_cast<const uint4 *>(tile_out + row * kStride + column);
        }
    }
}

// Rows of x that a thread copies: rows first + Apart * i of a tile.
template <typename T, bool IsDown, int Rows, int Apart> struct MoeXRows {
    const T *rows[Rows];
    bool has[Rows];

    __device__ __forceinline__ MoeXRows(const MoeArgs<T> &args, const MoeTile &tile, int first) {
        const int32_t *pairs = args.sorted + args.n_experts + 1;
#pragma unroll
        for (int i = 0; i < Rows; ++i) {
            const int row = first + Apart * i;
            has[i] = row < tile.count;
            const int at = tile.first + (has[i] ? row : 0);
            rows[i] = IsDown ? args.hidden + int64_t(at) * args.di
                             : args.x + int64_t(pairs[at] / args.top_k) * args.ldx;
        }
    }
    // 8 values from `column` on, to chunk `chunk` of the rows of a stage.
    __device__ __forceinline__ void copy(uint32_t to, int first, int chunk, int column,
                                         bool is_inside) const {
#pragma unroll
        for (int i = 0; i < Rows; ++i) {
            cp_async_16(to + swizzle_128b(first + Apart * i, chunk),
                        rows[i] + (is_inside ? column : 0), has[i] && is_inside);
        }
    }
};

// Tiles of TileN pairs at most.
template <int TileN, typename T> unsigned moe_tiles(const MoeArgs<T> &args) {
    const int64_t pairs = int64_t(args.n) * args.top_k;
    return unsigned(std::min<int64_t>(pairs, args.n_experts) + pairs / TileN);
}

template <typename T, int TileN, bool IsDown>
__global__ void __launch_bounds__(kMoeThreads) moe_gemm_kernel(MoeArgs<T> args) {
    constexpr int kStages = moe_stages(TileN);
    constexpr uint32_t kStage = moe_stage_bytes(TileN);
    constexpr int kTileOut = IsDown ? kMoeTileM : kMoeTileM / 2; // outputs of a block
    constexpr int kNTiles = TileN / 8;
    constexpr int kXRows = TileN >= 16 ? TileN / 16 : 1; // rows of x that a thread copies
    static_assert(TileN * (kTileOut + 8) * 2 <= kStages * int(kStage));
    extern __shared__ unsigned char dynamic[];
    const uint32_t buffer = (smem_address(dynamic) + 127u) & ~127u;
    unsigned char *staging = dynamic + (buffer - smem_address(dynamic));

    launch_dependents();
    grid_dependency_wait();
    const MoeTile tile = find_moe_tile<TileN>(args.sorted, args.n_experts, int(blockIdx.y));
    if (tile.expert < 0) {
        return;
    }
    const int warp = int(threadIdx.x) / kWarpSize, lane = int(threadIdx.x) % kWarpSize;
    const int n_out = IsDown ? args.hs : args.di;
    const int k = IsDown ? args.di : args.hs;
    const int first_out = int(blockIdx.x) * kTileOut;
    const int chunk = int(threadIdx.x) % 8, copy_row = int(threadIdx.x) / 8;

    // Copies: thread t moves chunk t % 8 of rows t / 8 + 16 i.
    const MoeXRows<T, IsDown, kXRows, 16> x(args, tile, copy_row);
    const int64_t expert_row = int64_t(tile.expert) * n_out;
    const T *first_weight = (IsDown ? args.down : args.gate) + expert_row * k;
    const T *second_weight = IsDown ? first_weight : args.up + expert_row * k;
    const auto load = [&](int k_tile) {
        const int column = k_tile * kMoeTileK + chunk * 8;
        const bool is_inside = column < k;
        const uint32_t to = buffer + uint32_t(k_tile % kStages) * kStage;
#pragma unroll
        for (int i = 0; i < kMoeTileM / 16; ++i) {
            // Rows 0 to 15 of each 32 are gate, 16 to 31 up.
            const int row = first_out + copy_row + 16 * (IsDown ? i : i / 2);
            const T *from = !IsDown && i % 2 == 1 ? second_weight : first_weight;
            const bool is_there = is_inside && row < n_out;
            cp_async_16(to + swizzle_128b(copy_row + 16 * i, chunk),
                        from + (is_there ? int64_t(row) * k + column : 0), is_there);
        }
        if (TileN >= 16 || copy_row < TileN) {
            x.copy(to + kMoeTileM * kMoeRowBytes, copy_row, chunk, column, is_inside);
        }
    };
    const int k_tiles = (k + kMoeTileK - 1) / kMoeTileK;
#pragma unroll
    for (int i = 0; i < kStages - 1; ++i) {
        if (i < k_tiles) {
            load(i);
        }
        cp_async_commit_group();
    }

    float sums[2][kNTiles][4] = {};
    for (int k_tile = 0; k_tile < k_tiles; ++k_tile) {
        cp_async_wait_group<kStages - 2>();
        __syncthreads();
        if (k_tile + kStages - 1 < k_tiles) {
            load(k_tile + kStages - 1);
        }
        cp_async_commit_group();
        const uint32_t w_at = buffer + uint32_t(k_tile % kStages) * kStage;
        const uint32_t x_at = w_at + kMoeTileM * kMoeRowBytes;
#pragma unroll
        for (int step = 0; step < kMoeTileK / 16; ++step) {
            uint32_t a[2][4];
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                // Matrices: rows 0-7 and 8-15 at chunk 2 step, the same at the next chunk.
                const int row = warp * 32 + half * 16 + lane % 16;
                ldmatrix_x4(a[half], w_at + swizzle_128b(row, 2 * step + lane / 16));
            }
            if constexpr (kNTiles == 1) {
                // Both chunks of the 8 rows; the other two matrices repeat them.
                uint32_t b[4];
                ldmatrix_x4(b, x_at + swizzle_128b(lane % 8, 2 * step + lane / 8 % 2));
                mma_m16n8k16<T>(sums[0][0], a[0], b[0], b[1]);
                mma_m16n8k16<T>(sums[1][0], a[1], b[0], b[1]);
            } else {
#pragma unroll
                for (int pair = 0; pair < kNTiles / 2; ++pair) {
                    uint32_t b[4];
                    const int row = pair * 16 + lane / 16 * 8 + lane % 8;
                    ldmatrix_x4(b, x_at + swizzle_128b(row, 2 * step + lane / 8 % 2));
                    mma_m16n8k16<T>(sums[0][2 * pair], a[0], b[0], b[1]);
                    mma_m16n8k16<T>(sums[1][2 * pair], a[1], b[0], b[1]);
                    mma_m16n8k16<T>(sums[0][2 * pair + 1], a[0], b[2], b[3]);
                    mma_m16n8k16<T>(sums[1][2 * pair + 1], a[1], b[2], b[3]);
                }
            }
        }
    }
    cp_async_wait_group<0>();
    __syncthreads();

    store_moe_tile<T, TileN, IsDown>(args, tile, sums, staging, first_out);
}

template <typename T, int TileN>
void moe_gemm(const device::CudaStream &stream, const MoeArgs<T> &args) {
    const unsigned tiles = moe_tiles<TileN>(args);
    const size_t smem = moe_smem(TileN);
    const auto first = moe_gemm_kernel<T, TileN, false>;
    const auto second = moe_gemm_kernel<T, TileN, true>;
    set_max_dynamic_smem(first, smem);
    set_max_dynamic_smem(second, smem);
    launch(stream, first, dim3(ceil_div(args.di, kMoeTileM / 2), tiles), kMoeThreads, smem, true,
           args);
    launch(stream, second, dim3(ceil_div(args.hs, kMoeTileM), tiles), kMoeThreads, smem, true,
           args);
}

} // namespace llaisys::ops::cuda
