// Grouped GEMM over the experts for many pairs on compute capability 9.0 (TMA + wgmma). The rows of x
// are gathered in the order of the sorted pairs first (moe_gather_kernel), so that a tile of pairs is
// one TMA tile.
//
// A block computes 256 weight rows of one expert for 128 pairs: weights are the A operand, pairs the
// B operand. Two consumer warpgroups hold two m64n128 accumulators each: 64 rows of gate and the same
// 64 of up, or 128 rows of down. One thread is the TMA producer. A pipeline stage is 64 values of k:
// 32 KB of weights and 16 KB of pairs, four stages. Rows past the end of the expert's weights or
// pairs are computed and not stored. Blocks are persistent: the next tile is loaded while the sums of
// the last one are stored.
//
// Bound: L2 to SM bandwidth (85 FLOP per loaded byte), then tensor cores.
#pragma once

#include "ops/cuda/swiglu_rows.cuh"
#include "ops/cuda/tma_pipeline.cuh"
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
constexpr int kMoeSm90OwnSmem = 4 << 10; // upper bound of the static shared memory
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

// Stores the sums of a warpgroup, 2 N columns of pairs. A lane holds two pairs of an output;
// movmatrix and a transpose of four registers leave eight adjacent outputs of a pair.
template <typename T, bool IsDown, int N>
__device__ __forceinline__ void store_moe_sums(const MoeArgs<T> &args, const MoeTile &tile,
                                               const float (&sums)[2][N], int first_out,
                                               int group) {
    const int lane = int(threadIdx.x) % kWarpSize;
    const int warp = int(threadIdx.x) / kWarpSize % 4; // of the warpgroup
    const int n_out = IsDown ? args.hs : args.di;
    const int row = first_out + group * (IsDown ? 128 : 64) + warp * 16;
    const int32_t *pairs = args.sorted + args.n_experts + 1 + tile.first;
    const auto bias = [&](const Reals &values, int output) {
        return values.data != nullptr && output < n_out
                   ? values.load(int64_t(tile.expert) * n_out + output)
                   : 0.0f;
    };
    float first_bias[2], second_bias[2]; // of rows lane / 4 and lane / 4 + 8
#pragma unroll
    for (int high = 0; high < 2; ++high) {
        const int output = row + lane / 4 + 8 * high;
        first_bias[high] = bias(IsDown ? args.down_bias : args.gate_bias, output);
        second_bias[high] = IsDown ? bias(args.down_bias, output + 64) : bias(args.up_bias, output);
    }
    // Blocks of 8 outputs and 8 pairs; four of them at a time.
    const auto block = [&](int j, int high, bool is_second) {
        const float *a = sums[0] + 4 * j + 2 * high, *b = sums[1] + 4 * j + 2 * high;
        float low, next;
        if constexpr (IsDown) {
            low = is_second ? b[0] + second_bias[high] : a[0] + first_bias[high];
            next = is_second ? b[1] + second_bias[high] : a[1] + first_bias[high];
        } else {
            const float2 gate = make_float2(a[0] + first_bias[high], a[1] + first_bias[high]);
            const float2 up = make_float2(b[0] + second_bias[high], b[1] + second_bias[high]);
            if (args.limit > 0) {
                low = moe_activation(gate.x, up.x, args.limit, args.alpha);
                next = moe_activation(gate.y, up.y, args.limit, args.alpha);
            } else {
                const float2 silu = silu_pair(gate.x, gate.y);
                low = up.x * silu.x;
                next = up.y * silu.y;
            }
        }
        return movmatrix_trans(pack_pair<T>(low, next));
    };
    const int q = lane % 4;
    constexpr int kStep = IsDown ? 1 : 2; // columns of blocks
#pragma unroll
    for (int j = 0; j < N / 4; j += kStep) {
        uint32_t words[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            words[i] = IsDown ? block(j, i % 2, i >= 2) : block(j + i / 2, i % 2, false);
        }
        transpose_quad(words); // this lane has block q
        const int column = (IsDown ? j : j + q / 2) * 8 + lane / 4;
        const int output = row + 8 * (q % 2) + (IsDown ? q / 2 * 64 : 0);
        if (column < tile.count && output < n_out) {
            const int64_t to = IsDown ? pairs[column] : tile.first + column;
            *reinterpret_cast<uint4 *>((IsDown ? args.expert_out : args.hidden) + to * n_out +
                                       output) = make_uint4(words[0], words[1], words[2], words[3]);
        }
    }
}

// Persistent: block b computes tiles b, b + blocks, ... first: map of gate or down; second: map of
// up.
template <typename T, bool IsDown>
__global__ void __launch_bounds__(kMoeSm90Threads, 1)
    moe_gemm_sm90_kernel(const __grid_constant__ CUtensorMap x,
                         const __grid_constant__ CUtensorMap first,
                         const __grid_constant__ CUtensorMap second, MoeArgs<T> args) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    constexpr int kTileOut = IsDown ? 256 : 128;
    extern __shared__ __align__(1024) unsigned char dynamic[];
    __shared__ int32_t offsets[kMoeMaxExperts + 1];
    const uint32_t buffer = (smem_address(dynamic) + 1023u) & ~1023u;
    const uint32_t full = buffer + kMoeSm90Stages * kMoeSm90Stage;
    const uint32_t empty = full + kMoeSm90Stages * 8;
    const int group = __shfl_sync(kFullMask, int(threadIdx.x) / kMoeSm90Group, 0);
    launch_dependents();
    if (threadIdx.x == 0) {
        init_stages(full, empty, kMoeSm90Stages, 1, 2); // consumer warpgroups
        fence_mbarrier_init();
    }
    grid_dependency_wait();
    for (int i = int(threadIdx.x); i <= args.n_experts; i += kMoeSm90Threads) {
        offsets[i] = args.sorted[i];
    }
    __syncthreads();
    const int n_out = IsDown ? args.hs : args.di;
    const int k = IsDown ? args.di : args.hs;
    const int k_tiles = (k + kTmaTileK - 1) / kTmaTileK;
    const int out_tiles = (n_out + kTileOut - 1) / kTileOut;
    const auto tile_at = [&](int t) {
        return find_moe_tile<kMoeSm90TileN>(offsets, args.n_experts, t / out_tiles);
    };
    PipelineStage<kMoeSm90Stages> stage;
    if (group == 2) {
        setmaxnreg_dec<40>();
        if (threadIdx.x >= kMoeSm90Consumers + kWarpSize) {
            return;
        }
        bool is_first_round = true;
        for (int t = int(blockIdx.x);; t += int(gridDim.x)) {
            const MoeTile tile = tile_at(t);
            if (tile.expert < 0) {
                return;
            }
            const int row = tile.expert * n_out + t % out_tiles * kTileOut;
            for (int k_tile = 0; k_tile < k_tiles; ++k_tile) {
                if (threadIdx.x == kMoeSm90Consumers) {
                    if (!is_first_round) {
                        mbarrier_wait_parity(empty + stage.index * 8, stage.parity ^ 1);
                    }
                    const uint32_t to = buffer + uint32_t(stage.index) * kMoeSm90Stage;
                    const uint32_t barrier = full + stage.index * 8;
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
                stage.next();
                is_first_round = is_first_round && stage.index != 0;
            }
            __syncwarp();
        }
    }
    setmaxnreg_inc<232>();
    const auto release = [&](int which) {
        if (threadIdx.x % kMoeSm90Group == 0) {
            mbarrier_arrive(empty + which * 8);
        }
    };
    const uint64_t of_w = k_major_descriptor(buffer + uint32_t(2 * group) * kMoeSm90SubBytes);
    const uint64_t of_x = k_major_descriptor(buffer + kMoeSm90WeightBytes);
    for (int t = int(blockIdx.x);; t += int(gridDim.x)) {
        const MoeTile tile = tile_at(t);
        if (tile.expert < 0) {
            return;
        }
        const auto compute = [&](auto &sums) { // of both halves of the warpgroup's rows
            mma_k_tiles<T, kMoeSm90Stage>(sums, k_tiles, of_w, of_x, full, stage, release);
            fence_operands(sums[0]);
            fence_operands(sums[1]);
            store_moe_sums<T, IsDown>(args, tile, sums, t % out_tiles * kTileOut, group);
        };
        if (tile.count > 64) {
            float sums[2][64];
            compute(sums);
        } else { // half of the columns
            float sums[2][32];
            compute(sums);
        }
    }
#endif
}

// Whether this build and device support the kernels.
inline bool has_moe_gemm_sm90(const device::CudaStream &stream) {
    return has_wgmma(stream) && stream.max_shared_bytes >= kMoeSm90Smem + kMoeSm90OwnSmem &&
           encode_tensor_map() != nullptr;
}

// expert_out holds the gathered rows of x until the second product overwrites it.
template <typename T> void moe_gemm_sm90(const device::CudaStream &stream, const MoeArgs<T> &args) {
    const int64_t pairs = int64_t(args.n) * args.top_k;
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
    launch(stream, first, unsigned(stream.n_sms), kMoeSm90Threads, size_t(kMoeSm90Smem), true,
           rows(args.expert_out, hs), weights(args.gate, count * di, hs),
           weights(args.up, count * di, hs), args);
    const CUtensorMap down = weights(args.down, count * hs, di);
    launch(stream, second, unsigned(stream.n_sms), kMoeSm90Threads, size_t(kMoeSm90Smem), true,
           rows(args.hidden, di), down, down, args);
}

} // namespace llaisys::ops::cuda
