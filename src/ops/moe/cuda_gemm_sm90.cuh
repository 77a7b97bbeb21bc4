// Grouped GEMM over the experts for many pairs on compute capability 9.0 (TMA + wgmma). The rows of x
// are gathered in the order of the sorted pairs first (moe_gather_kernel), so that a tile of pairs is
// one TMA tile.
//
// A block computes 256 weight rows of one expert for 128 pairs: weights are the A operand, pairs the
// B operand. Two consumer warpgroups hold two m64n128 accumulators each: 64 rows of gate and the same
// 64 of up, or 128 rows of down. One thread is the TMA producer. A pipeline stage is 64 values of k:
// 32 KB of weights and 16 KB of pairs, four stages. Rows past the end of the expert's weights or
// pairs are computed and not stored.
//
// Bound: L2 to SM bandwidth (85 FLOP per loaded byte), then tensor cores.
#pragma once

#include "ops/cuda/mbarrier.cuh"
#include "ops/cuda/tma.cuh"
#include "ops/moe/cuda_gemm.cuh"

namespace llaisys::ops::cuda {

constexpr int kMoeSm90TileN = 128;
constexpr int kMoeSm90Stages = 4;
constexpr int kMoeSm90Group = 128; // threads of a warpgroup
constexpr int kMoeSm90Threads = 3 * kMoeSm90Group;
constexpr int kMoeSm90Consumers = 2 * kMoeSm90Group;
constexpr int kMoeSm90SubRows = 64; // weight rows of a wgmma
constexpr uint32_t kMoeSm90SubBytes = kMoeSm90SubRows * kTmaRowBytes;
constexpr uint32_t kMoeSm90WeightBytes = 4 * kMoeSm90SubBytes;
constexpr uint32_t kMoeSm90Stage = kMoeSm90WeightBytes + kMoeSm90TileN * kTmaRowBytes;
constexpr int kMoeSm90Smem = 1024 + int(kMoeSm90Stages * kMoeSm90Stage) + 2 * kMoeSm90Stages * 8;
constexpr int kMoeGatherThreads = 256;

// to[s] = x of sorted pair s; one warp per pair.
template <typename T>
__global__ void __launch_bounds__(kMoeGatherThreads) moe_gather_kernel(MoeArgs<T> args, T *to) {
    launch_dependents();
    grid_dependency_wait();
    const int warp = int(threadIdx.x) / kWarpSize, lane = int(threadIdx.x) % kWarpSize;
    const int64_t at = int64_t(blockIdx.x) * (kMoeGatherThreads / kWarpSize) + warp;
    if (at >= int64_t(args.n) * args.top_k) {
        return;
    }
    const int pair = args.sorted[args.n_experts + 1 + at];
    const auto *from = reinterpret_cast<const uint4 *>(args.x + pair / args.top_k * args.ldx);
    auto *out = reinterpret_cast<uint4 *>(to + at * args.hs);
    constexpr int kAtOnce = 8;
    const int units = args.hs / 8;
    for (int first = lane; first < units; first += kAtOnce * kWarpSize) {
        uint4 values[kAtOnce];
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
            values[i] = from[min(first + i * kWarpSize, units - 1)];
        }
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
            if (first + i * kWarpSize < units) {
                out[first + i * kWarpSize] = values[i];
            }
        }
    }
}

// sums of both halves of the warpgroup's rows over all stages, 2 N columns of pairs.
template <typename T, int N>
__device__ __forceinline__ void multiply_moe_tiles(float (&sums)[2][N], int k_tiles, int group,
                                                   uint32_t buffer, uint32_t full, uint32_t empty) {
    for (int k_tile = 0; k_tile < k_tiles; ++k_tile) {
        const int stage = k_tile % kMoeSm90Stages;
        mbarrier_wait_parity(full + stage * 8, (k_tile / kMoeSm90Stages) & 1);
        const uint32_t at = buffer + uint32_t(stage) * kMoeSm90Stage;
        const uint64_t of_x = k_major_descriptor(at + kMoeSm90WeightBytes);
        const uint64_t of_w = k_major_descriptor(at + uint32_t(2 * group) * kMoeSm90SubBytes);
        wgmma_fence();
#pragma unroll
        for (int step = 0; step < 4; ++step) { // advance 32 bytes each
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                Wgmma<T>::k_major(sums[half],
                                  of_w + uint64_t(step * 2 + half * int(kMoeSm90SubBytes >> 4)),
                                  of_x + uint64_t(step * 2), k_tile > 0 || step > 0);
            }
        }
        wgmma_commit_group();
        if (k_tile > 0) { // the previous group of wgmma has completed
            wgmma_wait_group<1>();
            if (threadIdx.x % kMoeSm90Group == 0) {
                mbarrier_arrive(empty + (k_tile - 1) % kMoeSm90Stages * 8);
            }
        }
    }
    wgmma_wait_group<0>();
    fence_operands(sums[0]);
    fence_operands(sums[1]);
}

// first: map of gate or down; second: map of up.
template <typename T, bool IsDown>
__global__ void __launch_bounds__(kMoeSm90Threads, 1)
    moe_gemm_sm90_kernel(const __grid_constant__ CUtensorMap x,
                         const __grid_constant__ CUtensorMap first,
                         const __grid_constant__ CUtensorMap second, MoeArgs<T> args) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    constexpr int kTileOut = IsDown ? 256 : 128;
    extern __shared__ __align__(1024) unsigned char dynamic[];
    const uint32_t buffer = (smem_address(dynamic) + 1023u) & ~1023u;
    const uint32_t full = buffer + kMoeSm90Stages * kMoeSm90Stage;
    const uint32_t empty = full + kMoeSm90Stages * 8;
    const int group = __shfl_sync(kFullMask, int(threadIdx.x) / kMoeSm90Group, 0);
    launch_dependents();
    if (threadIdx.x == 0) {
        for (int i = 0; i < kMoeSm90Stages; ++i) {
            mbarrier_init(full + i * 8, 1);
            mbarrier_init(empty + i * 8, 2); // consumer warpgroups
        }
        fence_mbarrier_init();
    }
    grid_dependency_wait();
    const MoeTile tile = find_moe_tile<kMoeSm90TileN>(args.sorted, args.n_experts, int(blockIdx.y));
    if (tile.expert < 0) {
        return;
    }
    __syncthreads();
    const int n_out = IsDown ? args.hs : args.di;
    const int k = IsDown ? args.di : args.hs;
    const int k_tiles = (k + kTmaTileK - 1) / kTmaTileK;
    const int first_out = int(blockIdx.x) * kTileOut;
    const int64_t expert_row = int64_t(tile.expert) * n_out;
    if (group == 2) {
        setmaxnreg_dec<40>();
        if (threadIdx.x == kMoeSm90Consumers) {
            const int row = int(expert_row) + first_out;
            for (int k_tile = 0; k_tile < k_tiles; ++k_tile) {
                const int stage = k_tile % kMoeSm90Stages;
                if (k_tile >= kMoeSm90Stages) {
                    mbarrier_wait_parity(empty + stage * 8, (k_tile / kMoeSm90Stages - 1) & 1);
                }
                const uint32_t to = buffer + uint32_t(stage) * kMoeSm90Stage;
                const uint32_t barrier = full + stage * 8;
                const int column = k_tile * kTmaTileK;
                mbarrier_arrive_expect_tx(barrier, kMoeSm90Stage);
#pragma unroll
                for (int sub = 0; sub < 4; ++sub) {
                    const int from = row + (IsDown ? sub : sub / 2) * kMoeSm90SubRows;
                    tma_load(to + sub * kMoeSm90SubBytes,
                             !IsDown && sub % 2 == 1 ? &second : &first, column, from, barrier);
                }
                tma_load(to + kMoeSm90WeightBytes, &x, column, tile.first, barrier);
            }
        }
        return;
    }
    setmaxnreg_inc<232>();
    float sums[2][64];
    if (tile.count > 64) {
        multiply_moe_tiles<T>(sums, k_tiles, group, buffer, full, empty);
    } else { // half of the columns
        float halves[2][32];
        multiply_moe_tiles<T>(halves, k_tiles, group, buffer, full, empty);
#pragma unroll
        for (int i = 0; i < 32; ++i) {
            sums[0][i] = halves[0][i];
            sums[1][i] = halves[1][i];
            sums[0][i + 32] = sums[1][i + 32] = 0;
        }
    }
    named_barrier_sync<1, kMoeSm90Consumers>(); // all stages have been read

    // Transpose through shared memory: [128 pairs][kTileOut], then rows of 16-byte units.
    constexpr int kStride = kTileOut + 8;
    static_assert(kMoeSm90TileN * kStride * 2 <= kMoeSm90Stages * int(kMoeSm90Stage));
    T *tile_out = reinterpret_cast<T *>(dynamic + (buffer - smem_address(dynamic)));
    const int lane = int(threadIdx.x) % kWarpSize;
    const int warp = int(threadIdx.x) / kWarpSize % 4; // of the warpgroup
    const auto bias = [&](const Reals &values, int row) {
        const int output = first_out + row;
        return values.data != nullptr && output < n_out ? values.load(expert_row + output) : 0.0f;
    };
#pragma unroll
    for (int high = 0; high < 2; ++high) { // accumulator rows l / 4 and l / 4 + 8
        const int row = (IsDown ? group * 128 : group * 64) + warp * 16 + lane / 4 + 8 * high;
        const float first_bias = bias(IsDown ? args.down_bias : args.gate_bias, row);
        const float second_bias = IsDown ? bias(args.down_bias, row + 64) : bias(args.up_bias, row);
#pragma unroll
        for (int j = 0; j < 16; ++j) {
#pragma unroll
            for (int c = 0; c < 2; ++c) {
                const int column = j * 8 + lane % 4 * 2 + c;
                const float a = sums[0][4 * j + 2 * high + c] + first_bias;
                const float b = sums[1][4 * j + 2 * high + c] + second_bias;
                if constexpr (IsDown) {
                    tile_out[column * kStride + row] = from_float<T>(a);
                    tile_out[column * kStride + row + 64] = from_float<T>(b);
                } else {
                    tile_out[column * kStride + row] =
                        from_float<T>(moe_activation(a, b, args.limit, args.alpha));
                }
            }
        }
    }
    named_barrier_sync<1, kMoeSm90Consumers>();
    constexpr int kUnits = kTileOut / 8;
    const int32_t *pairs = args.sorted + args.n_experts + 1;
    for (int i = int(threadIdx.x); i < tile.count * kUnits; i += kMoeSm90Consumers) {
        const int row = i / kUnits, column = i % kUnits * 8;
        if (first_out + column < n_out) {
            const int64_t to = IsDown ? pairs[tile.first + row] : tile.first + row;
            T *out = (IsDown ? args.expert_out : args.hidden) + to * n_out + first_out + column;
            *reinterpret_cast<uint4 *>(out) =
                *reinterpret_cast<const uint4 *>(tile_out + row * kStride + column);
        }
    }
#endif
}

// Whether this build and device support the kernels.
inline bool has_moe_gemm_sm90(const device::CudaStream &stream) {
    return has_wgmma(stream) && stream.max_shared_bytes >= kMoeSm90Smem &&
           encode_tensor_map() != nullptr;
}

// expert_out holds the gathered rows of x until the second product overwrites it.
template <typename T> void moe_gemm_sm90(const device::CudaStream &stream, const MoeArgs<T> &args) {
    const int64_t pairs = int64_t(args.n) * args.top_k;
    const unsigned tiles =
        unsigned(std::min<int64_t>(pairs, args.n_experts) + pairs / kMoeSm90TileN);
    const int64_t hs = args.hs, di = args.di, count = args.n_experts;
    const auto weights = [](const T *data, int64_t rows, int64_t columns) {
        return make_tensor_map<T, 2>(data, {columns, rows}, {columns}, {kMoeSm90SubRows});
    };
    const auto rows = [&](const T *data, int64_t columns) {
        return make_tensor_map<T, 2>(data, {columns, pairs}, {columns}, {kMoeSm90TileN});
    };
    const auto first = moe_gemm_sm90_kernel<T, false>;
    const auto second = moe_gemm_sm90_kernel<T, true>;
    set_max_dynamic_smem(first, size_t(kMoeSm90Smem));
    set_max_dynamic_smem(second, size_t(kMoeSm90Smem));
    launch(stream, moe_gather_kernel<T>, ceil_div(pairs, kMoeGatherThreads / kWarpSize),
           kMoeGatherThreads, 0, true, args, args.expert_out);
    launch(stream, first, dim3(ceil_div(di, 128), tiles), kMoeSm90Threads, size_t(kMoeSm90Smem),
           true, rows(args.expert_out, hs), weights(args.gate, count * di, hs),
           weights(args.up, count * di, hs), args);
    const CUtensorMap down = weights(args.down, count * hs, di);
    launch(stream, second, dim3(ceil_div(hs, 256), tiles), kMoeSm90Threads, size_t(kMoeSm90Smem),
           true, rows(args.hidden, di), down, down, args);
}

} // namespace llaisys::ops::cuda
