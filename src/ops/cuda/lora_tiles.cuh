// Arguments and parts of the LoRA kernels: 16-row tiles on tensor cores, operands loaded from global
// memory into registers.
//
// shrink: within a block of 32 values of the input, a lane has 8 adjacent ones of x and of A, which
// form the operands of two mma; the order of k within a block is permuted alike in both.
//
// expand: column j of output tile c of a warp is output (j / 2) * 2 n_tiles + 2 c + j % 2, so that
// a lane ends with 2 n_tiles adjacent outputs; the order of ranks within an mma is permuted alike in
// both operands.
#pragma once

#include "ops/cuda/common.cuh"
#include "ops/lora/op.hpp"

namespace llaisys::ops::cuda {

constexpr int kLoraThreads = 256;
constexpr int kLoraWarps = kLoraThreads / kWarpSize;
constexpr int kLoraMmaRows = 16;
constexpr int kLoraBlockK = 32;   // values of the input per pair of mma
constexpr int kLoraRankStep = 16; // ranks per mma of expand

struct LoraKernelPart {
    Reals a;              // [n_slots, max_rank, in]
    Reals b;              // [n_slots, out, max_rank]
    const int32_t *slots; // [n_slots, 2]
    Reals out;
    int64_t ldo;
    int n; // outputs

    // 0: the slot has no adapter for this product; its A and B are to be ignored.
    __device__ __forceinline__ float scale(int slot) const {
        return slots[2 * slot] > 0 ? __int_as_float(slots[2 * slot + 1]) : 0.0f;
    }
};

__device__ __forceinline__ float scaled_or_zero(float scale, float value) {
    return scale != 0.0f ? scale * value : 0.0f;
}

struct LoraArgs {
    LoraKernelPart parts[kMaxLoraParts];
    int n_parts;
    int max_rank;
    int k; // input size
    int64_t m;
    int splits;
    int column_blocks; // of shrink, for the largest rank
    Reals x;
    int64_t ldx;
    const int32_t *rows;
    const LoraTile *tiles; // the first is the header of LoraRows::tiles
    float *t;              // [splits, m, n_parts, max_rank]

    __device__ __forceinline__ int n_adapter_tiles() const { return tiles[0].slot; }
    __device__ __forceinline__ int n_tiles() const { return tiles[0].first; }
    __device__ __forceinline__ LoraTile tile(int i) const {
        const int4 bits = reinterpret_cast<const int4 *>(tiles)[1 + i];
        return {bits.x, bits.y, bits.z, bits.w};
    }
    __device__ __forceinline__ float *sums(int split, int64_t i, int part) const {
        return t + ((split * m + i) * n_parts + part) * max_rank;
    }
};

constexpr int kLoraColumnTiles = 6; // of 8 ranks, summed at a time by shrink and norm

inline LoraArgs lora_args(const LoraRows &rows, const Tensor &terms, int64_t splits) {
    LoraArgs args{};
    args.m = rows.rows.size(0);
    args.splits = int(splits);
    args.rows = rows.rows.as<int32_t>();
    args.tiles = reinterpret_cast<const LoraTile *>(rows.tiles.as<int32_t>());
    args.t = terms.as<float>();
    return args;
}

// out null: t only.
inline void add_lora_part(LoraArgs *args, const LoraWeight &weight, const Tensor *out) {
    LoraKernelPart &part = args->parts[args->n_parts++];
    part.a = reals(weight.a);
    part.b = reals(weight.b);
    part.slots = weight.slots.as<int32_t>();
    part.n = int(weight.out_features());
    if (out != nullptr) {
        part.out = reals(*out);
        part.ldo = out->stride(0);
    }
    args->k = int(weight.in_features());
    args->max_rank = int(weight.max_rank());
    args->column_blocks =
        int(ceil_div(int64_t(args->n_parts) * args->max_rank, 8 * kLoraColumnTiles));
}

// 16-row parts of a tile of m rows.
inline int lora_tile_parts(int64_t m) { return int(ceil_div(lora_tile_rows(m), kLoraMmaRows)); }

inline int64_t lora_tiles_of(const LoraRows &rows) { return rows.tiles.size(0) - 1; }

// launch_dependents() at the start of a kernel and grid_dependency_wait() once. Tiles, rows and
// adapters may be read before: the first kernel of a step waits for them before it launches
// dependents. Every thread must call it, because the kernel after this one relies on the wait.
struct LoraWait {
    bool is_done = false;

    __device__ __forceinline__ LoraWait() { launch_dependents(); }
    __device__ __forceinline__ void operator()() {
        if (!is_done) {
            grid_dependency_wait();
            is_done = true;
        }
    }
};

__device__ __forceinline__ void prefetch_l2(const void *p) {
    asm volatile("prefetch.global.L2 [%0];" ::"l"(p));
}

__device__ __forceinline__ uint4 load_16_or_zero(const void *p, bool is_valid) {
    return is_valid ? *static_cast<const uint4 *>(p) : make_uint4(0, 0, 0, 0);
}

// Address of the lane's values of A in column tile `column` (8 ranks) when the ranks of all parts
// are counted one after another; null: none.
template <typename T>
__device__ __forceinline__ const T *lora_a(const LoraArgs &args, const LoraTile &tile, int column) {
    const int lane = threadIdx.x % kWarpSize;
    const int part = 8 * column / tile.rank;
    if (part >= args.n_parts) {
        return nullptr;
    }
    const int rank = 8 * column - part * tile.rank + lane / 4;
    return static_cast<const T *>(args.parts[part].a.data) +
           (int64_t(tile.slot) * args.max_rank + rank) * args.k + lane % 4 * 8;
}

// acc += x * A of one block of 32 values: low and high are those of rows g and g + 8.
template <typename T>
__device__ __forceinline__ void lora_shrink_mma(float (&acc)[4], const uint4 &low,
                                                const uint4 &high, const uint4 &a) {
    const uint32_t first[4] = {low.x, high.x, low.y, high.y};
    const uint32_t second[4] = {low.z, high.z, low.w, high.w};
    mma_m16n8k16<T>(acc, first, a.x, a.y);
    mma_m16n8k16<T>(acc, second, a.z, a.w);
}

// The operand t of expand: low and high are four ranks of rows g and g + 8.
template <typename T>
__device__ __forceinline__ void lora_operand(float scale, const float4 &low, const float4 &high,
                                             uint32_t (&operand)[4]) {
    const auto pair = [&](float x, float y) {
        return pack_pair<T>(scaled_or_zero(scale, x), scaled_or_zero(scale, y));
    };
    operand[0] = pair(low.x, low.y);
    operand[1] = pair(high.x, high.y);
    operand[2] = pair(low.z, low.w);
    operand[3] = pair(high.z, high.w);
}

__device__ __forceinline__ void add_4(float4 &sum, const float4 &value) {
    sum.x += value.x, sum.y += value.y, sum.z += value.z, sum.w += value.w;
}

// The outputs of one warp in expand: 8 * Tiles of them from `output` on.
template <typename T, int Tiles> struct LoraWarpOutputs {
    using Weights = uint2[Tiles];
    using Sums = float[Tiles][4];
    static constexpr int kOutputs = 8 * Tiles;

    const T *b; // of the lane's first output
    int max_rank;
    int left;  // outputs from the first one of the lane's columns on
    int first; // first of the lane's results

    __device__ __forceinline__ LoraWarpOutputs(const LoraArgs &args, const LoraKernelPart &part,
                                               int slot, int output) {
        const int lane = threadIdx.x % kWarpSize, g = lane / 4, q = lane % 4;
        const int column = output + g / 2 * 2 * Tiles + g % 2;
        max_rank = args.max_rank;
        left = part.n - column;
        first = output + 2 * Tiles * q;
        b = static_cast<const T *>(part.b.data) +
            (int64_t(max(slot, 0)) * part.n + column) * max_rank + 4 * q;
    }
    // Ranks [r, r + 16).
    __device__ __forceinline__ void load(int r, Weights &weights) const {
#pragma unroll
        for (int c = 0; c < Tiles; ++c) {
            weights[c] = 2 * c < left
                             ? *reinterpret_cast<const uint2 *>(b + int64_t(2 * c) * max_rank + r)
                             : make_uint2(0, 0);
        }
    }
    static __device__ __forceinline__ void multiply(const uint32_t (&operand)[4],
                                                    const Weights &weights, Sums &sums) {
#pragma unroll
        for (int c = 0; c < Tiles; ++c) {
            mma_m16n8k16<T>(sums[c], operand, weights[c].x, weights[c].y);
        }
    }
    // The sums of row g + 8 * half, vector v of the lane's outputs.
    static __device__ __forceinline__ void values(const Sums &sums, int half, int v,
                                                  float (&to)[8]) {
#pragma unroll
        for (int c = 0; c < 4; ++c) {
            to[2 * c] = sums[4 * v + c][2 * half];
            to[2 * c + 1] = sums[4 * v + c][2 * half + 1];
        }
    }
};

// Eight adjacent values of T or f32, loaded before they are used.
struct Vector8 {
    uint4 low, high; // high: f32 only
};
__device__ __forceinline__ Vector8 load_vector_8(const Reals &from, int64_t at) {
    if (from.dtype == LLAISYS_DTYPE_F32) {
        const auto *p = reinterpret_cast<const uint4 *>(static_cast<const float *>(from.data) + at);
        return {p[0], p[1]};
    }
    const auto *p = reinterpret_cast<const uint4 *>(static_cast<const uint16_t *>(from.data) + at);
    return {p[0], {}};
}
template <typename T>
__device__ __forceinline__ void unpack_8(const Vector8 &bits, bool is_f32, float (&to)[8]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const uint32_t low = reinterpret_cast<const uint32_t *>(&bits.low)[i];
        const uint32_t high = reinterpret_cast<const uint32_t *>(&bits.high)[i];
        if (is_f32) {
            to[i] = __uint_as_float(low);
            to[4 + i] = __uint_as_float(high);
        } else {
            to[2 * i] = to_float(reinterpret_cast<const T *>(&low)[0]);
            to[2 * i + 1] = to_float(reinterpret_cast<const T *>(&low)[1]);
        }
    }
}
template <typename T> __device__ __forceinline__ uint4 pack_8(const float (&values)[8]) {
    return make_uint4(pack_pair<T>(values[0], values[1]), pack_pair<T>(values[2], values[3]),
                      pack_pair<T>(values[4], values[5]), pack_pair<T>(values[6], values[7]));
}
template <typename T>
__device__ __forceinline__ void store_8(const Reals &to, int64_t at, const float (&values)[8]) {
    if (to.dtype == LLAISYS_DTYPE_F32) {
        auto *p = reinterpret_cast<float4 *>(static_cast<float *>(to.data) + at);
        p[0] = make_float4(values[0], values[1], values[2], values[3]);
        p[1] = make_float4(values[4], values[5], values[6], values[7]);
        return;
    }
    *reinterpret_cast<uint4 *>(static_cast<T *>(to.data) + at) = pack_8<T>(values);
}

// t of 16 rows of a tile, for all warps of a block: partial sums of the terms in shared memory.
template <int Parts> struct LoraTileTerms {
    // [groups, 16, n_parts * rank]: a group of threads sums every groups-th term.
    static constexpr int kValues = kLoraMmaRows * int(kLoraFusedRank) * Parts;
    __align__(16) float sums[kValues];

    static __device__ __forceinline__ int groups(int n_columns) {
        return max(1, 4 * kLoraThreads / (kLoraMmaRows * n_columns));
    }
    // Of the rows from index `at` of the tile on. __syncthreads() before operand().
    __device__ __forceinline__ void load(const LoraArgs &args, const LoraTile &tile, int at) {
        const int n_columns = args.n_parts * tile.rank, n_groups = groups(n_columns);
        const int size = kLoraMmaRows * n_columns;
        const int64_t stride = args.m * args.n_parts * args.max_rank;
        for (int i = 4 * threadIdx.x; i < n_groups * size; i += 4 * kLoraThreads) {
            const int group = i / size, row = i % size / n_columns, column = i % n_columns;
            const int part = column / tile.rank;
            float4 sum = make_float4(0, 0, 0, 0);
            if (at + row < tile.count) {
                const float *from =
                    args.sums(0, tile.first + at + row, part) + column - part * tile.rank;
#pragma unroll 8
                for (int s = group; s < args.splits; s += n_groups) {
                    add_4(sum, *reinterpret_cast<const float4 *>(from + s * stride));
                }
            }
            *reinterpret_cast<float4 *>(sums + i) = sum;
        }
    }
    // Operand of expand: 16 ranks from `column` on.
    template <typename T>
    __device__ __forceinline__ void operand(int n_columns, int column, float scale,
                                            uint32_t (&operand)[4], int n_groups) const {
        const int lane = threadIdx.x % kWarpSize, g = lane / 4, q = lane % 4;
        const float *from = sums + g * n_columns + column + 4 * q;
        float4 low = make_float4(0, 0, 0, 0), high = low;
        for (int i = 0; i < n_groups; ++i) {
            add_4(low, *reinterpret_cast<const float4 *>(from));
            add_4(high, *reinterpret_cast<const float4 *>(from + 8 * n_columns));
            from += kLoraMmaRows * n_columns;
        }
        lora_operand<T>(scale, low, high, operand);
    }
    template <typename T>
    __device__ __forceinline__ void operand(int n_columns, int column, float scale,
                                            uint32_t (&result)[4]) const {
        operand<T>(n_columns, column, scale, result, groups(n_columns));
    }
};

// Sums of the warps of a block: 16 rows, 8 * Tiles ranks.
template <int Tiles> struct LoraWarpSums {
    static constexpr int kColumns = 8 * Tiles;
    float sums[kLoraWarps][kLoraMmaRows][kColumns + 2];

    __device__ __forceinline__ void put(const float (&acc)[4], int c) {
        const int warp = threadIdx.x / kWarpSize, lane = threadIdx.x % kWarpSize;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            *reinterpret_cast<float2 *>(&sums[warp][lane / 4 + 8 * half][8 * c + 2 * (lane % 4)]) =
                make_float2(acc[2 * half], acc[2 * half + 1]);
        }
    }
    // The sum over the warps; after __syncthreads().
    __device__ __forceinline__ float get(int row, int column) const {
        float sum = 0;
#pragma unroll
        for (int w = 0; w < kLoraWarps; ++w) {
            sum += sums[w][row][column];
        }
        return sum;
    }
    // Stores the term `split` of the ranks from `first` on, counted over all parts, of the rows from
    // index `at` of the tile on. Synchronizes the block.
    __device__ __forceinline__ void store(const LoraArgs &args, const LoraTile &tile, int at,
                                          int split, int first, const float (&acc)[Tiles][4]) {
#pragma unroll
        for (int c = 0; c < Tiles; ++c) {
            put(acc[c], c);
        }
        __syncthreads();
        for (int i = threadIdx.x; i < kLoraMmaRows * kColumns; i += kLoraThreads) {
            const int row = i / kColumns, column = first + i % kColumns;
            const int part = column / tile.rank;
            if (part >= args.n_parts || at + row >= tile.count) {
                continue;
            }
            args.sums(split, tile.first + at + row, part)[column - part * tile.rank] =
                get(row, i % kColumns);
        }
        __syncthreads();
    }
};

} // namespace llaisys::ops::cuda
