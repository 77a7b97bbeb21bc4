// GEMM for M 1 to 16 with cp.async and mma.sync on compute capability 8, epilogues of
// gemm_epilogue.cuh. Bound: reading the weights once from DRAM. gemm_small_m.cuh selects the
// kernel.
//
// One block per SM loops over the units. Its 16 warps split k into chunks of 32; their partial
// sums are added through shared memory in warp order. Each lane copies 16 bytes of a row into its
// own pipeline stage and reads them back itself; k is permuted identically in both operands. 48
// to 72 KB per SM are in flight, across units; a block fits into 99 KB of shared memory. The
// first weights are loaded before grid_dependency_wait(). A single row of x stays in shared
// memory; several rows go through the pipeline with the weights.
#pragma once

#include "ops/cuda/gemm_epilogue.cuh"

namespace llaisys::ops::cuda {

constexpr int kSm80MaxM = 16; // largest M
constexpr int kSm80Warps = 16;
constexpr int kSm80Threads = kSm80Warps * kWarpSize;
constexpr int kSm80WarpK = 32;  // values of k per warp and stage
constexpr int kNormVectors = 2; // float4 values per thread of a normalized row

// Source of the rows of x.
enum class Sm80Rows {
    norm, // one f32 row, normalized on load
    one,  // one 16-bit row
    few,  // up to 8
    many  // up to 16
};

// 8-row tiles of x per stage.
__host__ __device__ constexpr int sm80_x_tiles(Sm80Rows rows) {
    return rows == Sm80Rows::few ? 1 : (rows == Sm80Rows::many ? 2 : 0);
}
__host__ __device__ constexpr int sm80_stages(Sm80Rows rows) {
    return rows == Sm80Rows::many ? 2 : 3;
}
// Bytes of one stage of a warp: two groups of 8 weight rows and the tiles of x, 512 bytes each.
__host__ __device__ constexpr int sm80_stage_bytes(Sm80Rows rows) {
    return (2 + sm80_x_tiles(rows)) * 512;
}
__host__ __device__ constexpr int buffer_bytes(Sm80Rows rows) {
    return kSm80Warps * sm80_stages(rows) * sm80_stage_bytes(rows);
}

// cp.async.cg of 16 bytes with a memory clobber; writes zeros when `is_there` is false.
__device__ __forceinline__ void cp_async_16_ordered(uint32_t shared, const void *p, bool is_there) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared), "l"(p),
                 "r"(is_there ? 16 : 0)
                 : "memory");
}

// RMS norm of one f32 row into shared memory; all threads of the block.
template <typename T>
__device__ __forceinline__ void norm_row(T *to, const GemmInput &in, float *scratch,
                                         const float4 (&scale)[kNormVectors]) {
    const auto *from = reinterpret_cast<const float4 *>(in.residual_row(0));
    float4 values[kNormVectors];
    float sum = 0;
#pragma unroll
    for (int i = 0; i < kNormVectors; ++i) {
        const int at = threadIdx.x + i * kSm80Threads;
        values[i] = load_or_zero(from, at, in.k / 4);
        sum += sum_of_squares(values[i]);
    }
    sum = block_sum<kSm80Threads>(sum, scratch);
    const float factor = 1.0f / sqrtf(sum / float(in.k) + in.epsilon);
#pragma unroll
    for (int i = 0; i < kNormVectors; ++i) {
        const int at = threadIdx.x + i * kSm80Threads;
        if (at < in.k / 4) {
            reinterpret_cast<uint2 *>(to)[at] = normed_pairs<T>(values[i], factor, scale[i]);
        }
    }
    __syncthreads();
}

// Copies one row of x into shared memory; all threads of the block.
template <typename T> __device__ __forceinline__ void copy_row(T *to, const GemmInput &in) {
    for (int i = threadIdx.x; i < in.k / 8; i += kSm80Threads) {
        reinterpret_cast<uint4 *>(to)[i] = static_cast<const uint4 *>(in.x)[i];
    }
    __syncthreads();
}

template <typename T, Sm80Rows Rows, typename Epilogue>
__global__ void __launch_bounds__(kSm80Threads, Rows == Sm80Rows::many ? 1 : 2)
    gemm_small_m_sm80_kernel(GemmInput in, Epilogue epilogue, int n_units) {
    constexpr bool kIsOne = Rows == Sm80Rows::norm || Rows == Sm80Rows::one;
    constexpr int kTiles = Rows == Sm80Rows::many ? 2 : 1;
    constexpr int kColumns = kIsOne ? 1 : 8 * kTiles; // accumulator columns that are stored
    constexpr int kDepth = sm80_stages(Rows);
    constexpr uint32_t kChunkBytes = sm80_stage_bytes(Rows);
    extern __shared__ __align__(128) unsigned char shared[]; // pipeline, then T [k] when kIsOne
    __shared__ float sums[2][kSm80Warps][16][kColumns + (kIsOne ? 0 : 1)];
    __shared__ float scratch[kSm80Warps];
    T *row_of_x = reinterpret_cast<T *>(shared + buffer_bytes(Rows));

    const int lane = threadIdx.x % kWarpSize;
    const int warp = threadIdx.x / kWarpSize;
    constexpr int kStep = kSm80WarpK * kSm80Warps; // values of k between chunks of a warp
    const int k_end = (in.k + kStep - 1) / kStep * kStep;
    const int own_k = warp * kSm80WarpK + lane % 4 * 8; // of the first chunk
    const uint32_t buffer =
        smem_address(shared) + uint32_t(warp) * kDepth * kChunkBytes + uint32_t(lane) * 16;

    // Next chunk to load.
    int next_unit = blockIdx.x;
    int next_k = own_k;
    const T *low_row = nullptr;
    const T *high_row = nullptr;
    const auto find_rows = [&] {
        const bool is_unit = next_unit < n_units;
        low_row = is_unit ? epilogue.row(next_unit, 0, lane / 4) : nullptr;
        high_row = is_unit ? epilogue.row(next_unit, 1, lane / 4) : nullptr;
    };
    const auto fetch_weights = [&](uint32_t to) {
        const bool is_inside = next_k < in.k;
        const bool has_low = is_inside && low_row != nullptr;
        const bool has_high = is_inside && high_row != nullptr;
        cp_async_16_ordered(to, has_low ? low_row + next_k : low_row, has_low);
        cp_async_16_ordered(to + 512, has_high ? high_row + next_k : high_row, has_high);
    };
    const auto fetch_rows = [&](uint32_t to, int k) {
#pragma unroll
        for (int tile = 0; tile < sm80_x_tiles(Rows); ++tile) {
            const int row = tile * 8 + lane / 4;
            const bool is_there = row < in.m && k < in.k;
            const auto *x = static_cast<const T *>(in.x);
            cp_async_16_ordered(to + 1024 + tile * 512, is_there ? x + row * in.ldx + k : x,
                                is_there);
        }
    };
    const auto advance = [&] {
        next_k += kStep;
        if (next_k >= k_end) {
            next_k = own_k;
            next_unit += gridDim.x;
            find_rows();
        }
    };

    launch_dependents();
    find_rows();
    int first_k[kDepth]; // x may not be read before grid_dependency_wait()
#pragma unroll
    for (int stage = 0; stage < kDepth; ++stage) {
        fetch_weights(buffer + stage * kChunkBytes);
        first_k[stage] = next_k;
        advance();
        if constexpr (kIsOne) {
            cp_async_commit_group();
        }
    }
    if constexpr (Rows == Sm80Rows::norm) {
        float4 scale[kNormVectors];
#pragma unroll
        for (int i = 0; i < kNormVectors; ++i) {
            const int at = threadIdx.x + i * kSm80Threads;
            scale[i] = load_or_zero(reinterpret_cast<const float4 *>(in.norm_weight), at, in.k / 4);
        }
        grid_dependency_wait();
        norm_row<T>(row_of_x, in, scratch, scale);
    } else if constexpr (Rows == Sm80Rows::one) {
        grid_dependency_wait();
        copy_row(row_of_x, in);
    } else {
        grid_dependency_wait();
#pragma unroll
        for (int stage = 0; stage < kDepth; ++stage) {
            fetch_rows(buffer + stage * kChunkBytes, first_k[stage]);
            cp_async_commit_group();
        }
    }

    float acc[kTiles][4] = {};
    int unit = blockIdx.x;
    int k = own_k;
    int parity = 0;
    const auto finish_unit = [&] {
#pragma unroll
        for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll
            for (int c = 0; c < 4; ++c) {
                const int column = tile * 8 + lane % 4 * 2 + (c & 1);
                if (column < kColumns) {
                    sums[parity][warp][lane / 4 + (c >> 1) * 8][column] = acc[tile][c];
                }
                acc[tile][c] = 0;
            }
        }
        // the double buffer of the next but one unit is free when all warps arrive here again
        __syncthreads();
        for (int i = threadIdx.x; i < 8 * in.m; i += kSm80Threads) {
            float total[2] = {};
#pragma unroll
            for (int w = 0; w < kSm80Warps; ++w) {
                total[0] += sums[parity][w][i % 8][i / 8];
                total[1] += sums[parity][w][i % 8 + 8][i / 8];
            }
            epilogue.store(
                unit, i % 8, i / 8, total[0], total[1],
                epilogue.prepare(unit, i % 8, load_operands(epilogue, unit, i % 8, i / 8)));
        }
        parity ^= 1;
    };
    while (unit < n_units) {
#pragma unroll
        for (int stage = 0; stage < kDepth; ++stage) {
            cp_async_wait_group<kDepth - 1>();
            const unsigned char *at = shared + (warp * kDepth + stage) * kChunkBytes + lane * 16;
            const uint4 low = *reinterpret_cast<const uint4 *>(at);
            const uint4 high = *reinterpret_cast<const uint4 *>(at + 512);
            const uint32_t a0[4] = {low.x, high.x, low.y, high.y};
            const uint32_t a1[4] = {low.z, high.z, low.w, high.w};
#pragma unroll
            for (int tile = 0; tile < kTiles; ++tile) {
                uint4 x = make_uint4(0, 0, 0, 0);
                if constexpr (kIsOne) {
                    if (lane < 4 && k < in.k) {
                        x = *reinterpret_cast<const uint4 *>(row_of_x + k);
                    }
                } else {
                    x = *reinterpret_cast<const uint4 *>(at + 1024 + tile * 512);
                }
                mma_m16n8k16<T>(acc[tile], a0, x.x, x.y);
                mma_m16n8k16<T>(acc[tile], a1, x.z, x.w);
            }
            fetch_weights(buffer + stage * kChunkBytes);
            fetch_rows(buffer + stage * kChunkBytes, next_k);
            cp_async_commit_group();
            advance();
            k += kStep;
            if (k >= k_end) {
                if (unit < n_units) {
                    finish_unit();
                }
                k = own_k;
                unit += gridDim.x;
            }
        }
    }
    cp_async_wait_group<0>();
}

template <typename T, Sm80Rows Rows, typename Epilogue>
void launch_gemm_small_m_sm80(const device::CudaStream &stream, const GemmInput &in,
                              const Epilogue &epilogue) {
    constexpr bool kIsOne = Rows == Sm80Rows::norm || Rows == Sm80Rows::one;
    const auto kernel = gemm_small_m_sm80_kernel<T, Rows, Epilogue>;
    const size_t bytes = buffer_bytes(Rows) + (kIsOne ? size_t(in.k) * sizeof(T) : 0);
    set_max_dynamic_smem(kernel, bytes);
    const int n_units = int((epilogue.count() + epilogue.items - 1) / epilogue.items);
    const int rounds = (n_units + stream.n_sms - 1) / stream.n_sms;
    const int grid = (n_units + rounds - 1) / rounds;
    launch(stream, kernel, unsigned(grid), kSm80Threads, bytes, true, in, epilogue, n_units);
}

template <typename T, typename Epilogue>
void run_gemm_small_m_sm80(const device::CudaStream &stream, const GemmInput &in,
                           const Epilogue &epilogue) {
    constexpr int kOwnShared = 4 << 10; // static shared memory of the one-row kernel
    const int64_t longest =
        (stream.max_shared_bytes - buffer_bytes(Sm80Rows::one) - kOwnShared) / int(sizeof(T));
    if (in.residual != nullptr) {
        launch_gemm_small_m_sm80<T, Sm80Rows::norm>(stream, in, epilogue);
    } else if (in.m == 1 && in.k <= longest) {
        launch_gemm_small_m_sm80<T, Sm80Rows::one>(stream, in, epilogue);
    } else if (in.m <= 8) {
        launch_gemm_small_m_sm80<T, Sm80Rows::few>(stream, in, epilogue);
    } else {
        launch_gemm_small_m_sm80<T, Sm80Rows::many>(stream, in, epilogue);
    }
}

} // namespace llaisys::ops::cuda
