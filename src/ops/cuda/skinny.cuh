// Products with few rows: out[m, n] = x[m, k] * w[n, k]^T for m <= 16, bound by reading w.
//
// The weights are the 16-row operand of the tensor cores and the rows of x its 8 columns. One block
// a processor walks through units of up to 16 weight rows, two groups of 8 that may lie anywhere
// (gate and up, the two halves of a head); its 16 warps share k in chunks of 32, and their sums are
// added in shared memory in the order of the warps. A lane copies 16 bytes of a row at a time into a
// ring of its own in shared memory (cp.async) and is the one that reads them back: k is dealt to the
// operands in an order of its own, the same for both. About 96 KB a processor are always on their
// way, also across units; the first weights before the kernel waits for its input. One row of x lies
// in shared memory as a whole, several go through the ring with the weights.
//
// What a unit is and what becomes of its sums is up to `Use`:
//   const T *weights(unit, group)        first row of a group
//   int rows(unit, group)                how many of its 8 rows exist
//   void store(unit, i, row, low, high)  sums of row i of both groups and row `row` of x
#pragma once

#include "ops/cuda/common.cuh"

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
    return rows == SkinnyRows::few ? 4 : (rows == SkinnyRows::many ? 5 : 6);
}
// Of one chunk of a warp: two groups of 8 weight rows and the tiles of x, 512 bytes each.
__host__ __device__ constexpr int ring_chunk_bytes(SkinnyRows rows) {
    return (2 + ring_tiles(rows)) * 512;
}
__host__ __device__ constexpr int ring_bytes(SkinnyRows rows) {
    return kSkinnyWarps * ring_depth(rows) * ring_chunk_bytes(rows);
}

// The rows of x: either 16-bit rows, or one f32 row that is normalised on the way in.
struct SkinnyInput {
    const void *x; // T [m, k], null when `residual` is given
    int64_t ldx;
    int m;
    int k;                 // a multiple of 8
    const float *residual; // f32 [.., k]
    int64_t ld_residual;
    const int32_t *rows; // which row of residual, null: the first
    const float *norm_weight;
    float epsilon;
};

// 16 bytes past the first-level cache; zeros when p is null.
__device__ __forceinline__ void copy_or_zero(uint32_t shared, const void *p) {
    if (p != nullptr) {
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared), "l"(p) : "memory");
    } else {
        asm volatile("st.shared.v4.u32 [%0], {%1, %1, %1, %1};" ::"r"(shared), "r"(0) : "memory");
    }
}

// Normalises one f32 row into shared memory; all threads of the block.
template <typename T>
__device__ __forceinline__ void norm_row(T *to, const SkinnyInput &in, float *scratch,
                                         const float4 (&scale)[kNormVectors]) {
    const float4 *from = reinterpret_cast<const float4 *>(
        in.residual + (in.rows != nullptr ? int64_t(*in.rows) * in.ld_residual : 0));
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
template <typename T> __device__ __forceinline__ void copy_row(T *to, const SkinnyInput &in) {
    for (int i = threadIdx.x; i < in.k / 8; i += kSkinnyThreads) {
        reinterpret_cast<uint4 *>(to)[i] = static_cast<const uint4 *>(in.x)[i];
    }
    __syncthreads();
}

template <typename T, SkinnyRows Rows, typename Use>
__global__ void __launch_bounds__(kSkinnyThreads, Rows == SkinnyRows::many ? 1 : 2)
    skinny_kernel(SkinnyInput in, Use use, int n_units) {
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
        const int i = lane / 4;
        const bool is_unit = next_unit < n_units;
        low_row = is_unit && i < use.rows(next_unit, 0)
                      ? use.weights(next_unit, 0) + int64_t(i) * in.k
                      : nullptr;
        high_row = is_unit && i < use.rows(next_unit, 1)
                       ? use.weights(next_unit, 1) + int64_t(i) * in.k
                       : nullptr;
    };
    const auto fetch_weights = [&](uint32_t to) {
        const bool is_inside = next_k < in.k;
        copy_or_zero(to, is_inside && low_row != nullptr ? low_row + next_k : nullptr);
        copy_or_zero(to + 512, is_inside && high_row != nullptr ? high_row + next_k : nullptr);
    };
    const auto fetch_rows = [&](uint32_t to, int k) {
#pragma unroll
        for (int tile = 0; tile < ring_tiles(Rows); ++tile) {
            const int row = tile * 8 + lane / 4;
            const bool is_there = row < in.m && k < in.k;
            copy_or_zero(to + 1024 + tile * 512,
                         is_there ? static_cast<const T *>(in.x) + row * in.ldx + k : nullptr);
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
            use.store(unit, i % 8, i / 8, total[0], total[1]);
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
void launch_skinny(const device::CudaStream &stream, SkinnyInput in, const Use &use, int n_units) {
    constexpr bool kIsOne = Rows == SkinnyRows::norm || Rows == SkinnyRows::one;
    const auto kernel = skinny_kernel<T, Rows, Use>;
    const size_t bytes = ring_bytes(Rows) + (kIsOne ? size_t(in.k) * sizeof(T) : 0);
    allow_shared(kernel, bytes);
    const int rounds = (n_units + stream.n_processors - 1) / stream.n_processors;
    const int grid = (n_units + rounds - 1) / rounds;
    launch(stream, kernel, unsigned(grid), kSkinnyThreads, bytes, true, in, use, n_units);
}

template <typename T, typename Use>
void run_skinny(const device::CudaStream &stream, const SkinnyInput &in, const Use &use,
                int n_units) {
    constexpr int64_t kLongestRow = 48 << 10; // values of one row that fit beside the ring
    if (in.residual != nullptr) {
        launch_skinny<T, SkinnyRows::norm>(stream, in, use, n_units);
    } else if (in.m == 1 && in.k <= kLongestRow) {
        launch_skinny<T, SkinnyRows::one>(stream, in, use, n_units);
    } else if (in.m <= 8) {
        launch_skinny<T, SkinnyRows::few>(stream, in, use, n_units);
    } else {
        launch_skinny<T, SkinnyRows::many>(stream, in, use, n_units);
    }
}

// Whether a row of this length can be normalised inside the product.
inline bool can_norm_inside(int64_t m, int64_t k) {
    return m == 1 && k % 8 == 0 && k <= int64_t(kSkinnyThreads) * 4 * kNormVectors;
}

// Rows of a unit, at most 16, so that all processors have as much to do.
inline int rows_of_unit(const device::CudaStream &stream, int64_t n) {
    const int64_t rounds = (n + 16 * stream.n_processors - 1) / (16 * stream.n_processors);
    const int64_t rows = (n + rounds * stream.n_processors - 1) / (rounds * stream.n_processors);
    return int(rows < 2 ? 2 : (rows + 1) / 2 * 2);
}

// out (+)= sums + bias: units of `unit_rows` neighbouring outputs, an even number up to 16.
template <typename T> struct StoreRows {
    const T *w; // [n, k]
    int64_t n, k;
    Reals bias; // data null: none
    Reals out;
    int64_t ldo;
    bool adds;
    int unit_rows;

    __device__ __forceinline__ int64_t first(int unit, int group) const {
        return int64_t(unit) * unit_rows + group * (unit_rows / 2);
    }
    __device__ __forceinline__ const T *weights(int unit, int group) const {
        return w + first(unit, group) * k;
    }
    __device__ __forceinline__ int rows(int unit, int group) const {
        const int64_t left = n - first(unit, group);
        return left < unit_rows / 2 ? int(left) : unit_rows / 2;
    }
    __device__ __forceinline__ void store_one(int64_t at, int row, float value) const {
        value += bias.data != nullptr ? bias.load(at) : 0.0f;
        value += adds ? out.load(row * ldo + at) : 0.0f;
        out.store(row * ldo + at, value);
    }
    __device__ __forceinline__ void store(int unit, int i, int row, float low, float high) const {
        if (i < rows(unit, 0)) {
            store_one(first(unit, 0) + i, row, low);
        }
        if (i < rows(unit, 1)) {
            store_one(first(unit, 1) + i, row, high);
        }
    }
};

} // namespace llaisys::ops::cuda
