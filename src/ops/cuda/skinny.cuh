// Products with up to 16 rows of x (few_rows_types.cuh): bound by reading the weights once. Where each
// kernel for few rows is the fastest is said in few_rows.cuh.
//
// One block a processor walks through the units; its 16 warps share k in chunks of 32, and their sums
// are added in shared memory in the order of the warps. A lane copies 16 bytes of a row at a time into
// a ring of its own in shared memory (cp.async) and is the one that reads them back: k is dealt to the
// operands in an order of its own, the same for both. About 48 to 72 KB a processor are always
// on their way, also across units; a block fits into the 99 KB that the smallest devices have. The first
// weights come before the kernel waits for its input. One row of x lies in shared memory as a whole,
// several go through the ring with the weights.
#pragma once

#include "ops/cuda/few_rows_types.cuh"

namespace llaisys::ops::cuda {

constexpr int kSkinnyRows = 16; // most rows of x
constexpr int kSkinnyWarps = 16;
constexpr int kSkinnyThreads = kSkinnyWarps * kWarp;
constexpr int kSkinnyChunk = 32; // of k, a warp
constexpr int kNormVectors = 2;  // of 4 values that a thread keeps of a row that it normalises

// Where the rows of x come from.
enum class SkinnyRows {
    norm, // one f32 row, normalised on the way in
    one,  // one 16-bit row
    few,  // up to 8
    many  // up to 16
};

// 8-row tiles of x that go through the ring.
__host__ __device__ constexpr int ring_tiles(SkinnyRows rows) {
    return rows == SkinnyRows::few ? 1 : (rows == SkinnyRows::many ? 2 : 0);
}
__host__ __device__ constexpr int ring_depth(SkinnyRows rows) {
    return rows == SkinnyRows::many ? 2 : 3;
}
// Of one chunk of a warp: two groups of 8 weight rows and the tiles of x, 512 bytes each.
__host__ __device__ constexpr int ring_chunk_bytes(SkinnyRows rows) {
    return (2 + ring_tiles(rows)) * 512;
}
__host__ __device__ constexpr int ring_bytes(SkinnyRows rows) {
    return kSkinnyWarps * ring_depth(rows) * ring_chunk_bytes(rows);
}

// 16 bytes past the first-level cache; zeros when they are not there.
__device__ __forceinline__ void copy_or_zero(uint32_t shared, const void *p, bool is_there) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared), "l"(p),
                 "r"(is_there ? 16 : 0)
                 : "memory");
}

// Normalises one f32 row into shared memory; all threads of the block.
template <typename T>
__device__ __forceinline__ void norm_row(T *to, const FewRowsInput &in, float *scratch,
                                         const float4 (&scale)[kNormVectors]) {
    const auto *from = reinterpret_cast<const float4 *>(in.residual_row(0));
    float4 values[kNormVectors];
    float sum = 0;
#pragma unroll
    for (int i = 0; i < kNormVectors; ++i) {
        const int at = threadIdx.x + i * kSkinnyThreads;
        values[i] = at < in.k / 4 ? from[at] : make_float4(0, 0, 0, 0);
        sum += values[i].x * values[i].x + values[i].y * values[i].y + values[i].z * values[i].z +
               values[i].w * values[i].w;
    }
    sum = block_sum<kSkinnyThreads>(sum, scratch);
    const float factor = 1.0f / sqrtf(sum / float(in.k) + in.epsilon);
#pragma unroll
    for (int i = 0; i < kNormVectors; ++i) {
        const int at = threadIdx.x + i * kSkinnyThreads;
        if (at < in.k / 4) {
            const float4 v = values[i];
            const float4 w = scale[i];
            reinterpret_cast<uint2 *>(to)[at] =
                make_uint2(pack_pair<T>(v.x * factor * w.x, v.y * factor * w.y),
                           pack_pair<T>(v.z * factor * w.z, v.w * factor * w.w));
        }
    }
    __syncthreads();
}

// Brings the one row of x into shared memory; all threads of the block.
template <typename T> __device__ __forceinline__ void copy_row(T *to, const FewRowsInput &in) {
    for (int i = threadIdx.x; i < in.k / 8; i += kSkinnyThreads) {
        reinterpret_cast<uint4 *>(to)[i] = static_cast<const uint4 *>(in.x)[i];
    }
    __syncthreads();
}

template <typename T, SkinnyRows Rows, typename Use>
__global__ void __launch_bounds__(kSkinnyThreads, Rows == SkinnyRows::many ? 1 : 2)
    skinny_kernel(FewRowsInput in, Use use, int n_units) {
    constexpr bool kIsOne = Rows == SkinnyRows::norm || Rows == SkinnyRows::one;
    constexpr int kTiles = Rows == SkinnyRows::many ? 2 : 1;
    constexpr int kColumns = kIsOne ? 1 : 8 * kTiles; // that are kept
    constexpr int kDepth = ring_depth(Rows);
    constexpr uint32_t kChunkBytes = ring_chunk_bytes(Rows);
    extern __shared__ __align__(128) unsigned char shared[]; // ring, then T [k] when kIsOne
    __shared__ float sums[2][kSkinnyWarps][16][kColumns + (kIsOne ? 0 : 1)];
    __shared__ float scratch[kSkinnyWarps];
    T *row_of_x = reinterpret_cast<T *>(shared + ring_bytes(Rows));

    const int lane = threadIdx.x % kWarp;
    const int warp = threadIdx.x / kWarp;
    constexpr int kStep = kSkinnyChunk * kSkinnyWarps; // of k, from chunk to chunk of a warp
    const int k_end = (in.k + kStep - 1) / kStep * kStep;
    const int own_k = warp * kSkinnyChunk + lane % 4 * 8; // of the first chunk
    const uint32_t ring =
        shared_address(shared) + uint32_t(warp) * kDepth * kChunkBytes + uint32_t(lane) * 16;

    // The chunk that will be fetched next.
    int next_unit = blockIdx.x;
    int next_k = own_k;
    const T *low_row = nullptr;
    const T *high_row = nullptr;
    const auto find_rows = [&] {
        const bool is_unit = next_unit < n_units;
        low_row = is_unit ? use.row(next_unit, 0, lane / 4) : nullptr;
        high_row = is_unit ? use.row(next_unit, 1, lane / 4) : nullptr;
    };
    const auto fetch_weights = [&](uint32_t to) {
        const bool is_inside = next_k < in.k;
        const bool has_low = is_inside && low_row != nullptr;
        const bool has_high = is_inside && high_row != nullptr;
        copy_or_zero(to, has_low ? low_row + next_k : low_row, has_low);
        copy_or_zero(to + 512, has_high ? high_row + next_k : high_row, has_high);
    };
    const auto fetch_rows = [&](uint32_t to, int k) {
#pragma unroll
        for (int tile = 0; tile < ring_tiles(Rows); ++tile) {
            const int row = tile * 8 + lane / 4;
            const bool is_there = row < in.m && k < in.k;
            const auto *x = static_cast<const T *>(in.x);
            copy_or_zero(to + 1024 + tile * 512, is_there ? x + row * in.ldx + k : x, is_there);
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

    allow_next();
    find_rows();
    int first_k[kDepth]; // of x: it may not be read yet
#pragma unroll
    for (int slot = 0; slot < kDepth; ++slot) {
        fetch_weights(ring + slot * kChunkBytes);
        first_k[slot] = next_k;
        advance();
        if constexpr (kIsOne) {
            copies_end_group();
        }
    }
    if constexpr (Rows == SkinnyRows::norm) {
        float4 scale[kNormVectors];
#pragma unroll
        for (int i = 0; i < kNormVectors; ++i) {
            const int at = threadIdx.x + i * kSkinnyThreads;
            scale[i] = at < in.k / 4 ? reinterpret_cast<const float4 *>(in.norm_weight)[at]
                                     : make_float4(0, 0, 0, 0);
        }
        wait_for_input();
        norm_row<T>(row_of_x, in, scratch, scale);
    } else if constexpr (Rows == SkinnyRows::one) {
        wait_for_input();
        copy_row(row_of_x, in);
    } else {
        wait_for_input();
#pragma unroll
        for (int slot = 0; slot < kDepth; ++slot) {
            fetch_rows(ring + slot * kChunkBytes, first_k[slot]);
            copies_end_group();
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
        __syncthreads(); // the buffer of the unit after the next is free once all are here again
        for (int i = threadIdx.x; i < 8 * in.m; i += kSkinnyThreads) {
            float total[2] = {};
#pragma unroll
            for (int w = 0; w < kSkinnyWarps; ++w) {
                total[0] += sums[parity][w][i % 8][i / 8];
                total[1] += sums[parity][w][i % 8 + 8][i / 8];
            }
            use.store(unit, i % 8, i / 8, total[0], total[1],
                      use.ready(unit, i % 8, hold(use, unit, i % 8, i / 8)));
        }
        parity ^= 1;
    };
    while (unit < n_units) {
#pragma unroll
        for (int slot = 0; slot < kDepth; ++slot) {
            copies_wait<kDepth - 1>();
            const unsigned char *at = shared + (warp * kDepth + slot) * kChunkBytes + lane * 16;
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
                mma<T>(acc[tile], a0, x.x, x.y);
                mma<T>(acc[tile], a1, x.z, x.w);
            }
            fetch_weights(ring + slot * kChunkBytes);
            fetch_rows(ring + slot * kChunkBytes, next_k);
            copies_end_group();
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
    copies_wait<0>();
}

template <typename T, SkinnyRows Rows, typename Use>
void launch_skinny(const device::CudaStream &stream, const FewRowsInput &in, const Use &use) {
    constexpr bool kIsOne = Rows == SkinnyRows::norm || Rows == SkinnyRows::one;
    const auto kernel = skinny_kernel<T, Rows, Use>;
    const size_t bytes = ring_bytes(Rows) + (kIsOne ? size_t(in.k) * sizeof(T) : 0);
    allow_shared(kernel, bytes);
    const int n_units = int((use.count() + use.items - 1) / use.items);
    const int rounds = (n_units + stream.n_processors - 1) / stream.n_processors;
    const int grid = (n_units + rounds - 1) / rounds;
    launch(stream, kernel, unsigned(grid), kSkinnyThreads, bytes, true, in, use, n_units);
}

template <typename T, typename Use>
void run_skinny(const device::CudaStream &stream, const FewRowsInput &in, const Use &use) {
    constexpr int kOwnShared = 4 << 10; // what the kernel for one row has besides
    const int64_t longest =
        (stream.max_shared_bytes - ring_bytes(SkinnyRows::one) - kOwnShared) / int(sizeof(T));
    if (in.residual != nullptr) {
        launch_skinny<T, SkinnyRows::norm>(stream, in, use);
    } else if (in.m == 1 && in.k <= longest) {
        launch_skinny<T, SkinnyRows::one>(stream, in, use);
    } else if (in.m <= 8) {
        launch_skinny<T, SkinnyRows::few>(stream, in, use);
    } else {
        launch_skinny<T, SkinnyRows::many>(stream, in, use);
    }
}

} // namespace llaisys::ops::cuda
