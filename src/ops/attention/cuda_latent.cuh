// Latent attention: one key/value head of kLatentDim values, of which the first kLatentValues are the
// value, for all query heads. 16-bit values, mma.sync.
//
// A block has 16 * RowTiles rows (query heads of one token, or of adjacent tokens of a sequence)
// against tiles of 32 entries, which it reads once for scores and for values (cp.async, two stages).
// Warps are arranged as RowTiles x kColumnWarps: a warp computes the scores of 16 rows with its share
// of the entries, the weights go through shared memory, and it sums its share of the value columns.
//
// Few tokens: the entries of a token are split over several blocks, and a second kernel combines the
// splits in order. The number of splits depends on the token's own range and on max_splits only.
//
// 64 rows: bound by mma.sync. 16 rows: memory-bound, 36 KiB per tile.
#pragma once

#include "ops/attention/cuda_launch.cuh"

#include <algorithm>

namespace llaisys::ops::cuda {

constexpr int kLatentKeys = 32;             // entries of a tile
constexpr int kLatentSplitTiles = 4;        // tiles of a split at least
constexpr int kLatentMaxSplits = 32;        // of a token
constexpr int kLatentExactSplits = 8;       // of a batch-invariant launch
constexpr int kLatentStaticBytes = 2 << 10; // upper bound of the static shared memory
constexpr int kLatentCombineThreads = 128;
constexpr int kLatentPitch = kLatentValues + 4; // floats of a row of a split: values, maximum, sum

template <int RowTiles> struct LatentShape {
    static constexpr int kColumnWarps = RowTiles == 1 ? 4 : 2;
    static constexpr int kThreads = RowTiles * kColumnWarps * kWarpSize;
    static constexpr int kRows = 16 * RowTiles;
    static constexpr int kWarpKeys = kLatentKeys / kColumnWarps;
    static constexpr int kWarpColumns = kLatentValues / kColumnWarps;
    static constexpr int kRowBytes = kTileRowBytes<kLatentDim>;
    static constexpr int kTileBytes = kLatentKeys * kRowBytes;
    static constexpr int kWeightBytes =
        kLatentKeys * 2 + 16; // of a row; conflict-free for ldmatrix
    static constexpr int kSharedBytes = kRows * (kRowBytes + kWeightBytes) + 2 * kTileBytes;
};

// Rows of the blocks. Grid (tile of tokens * max_splits, tile of heads, run).
struct LatentBlocks {
    const int32_t *runs;   // [n_runs, 2]; null: single tokens
    const int32_t *tokens; // single tokens; null: 0, 1, ...
    int heads;
    int block_heads;  // of a block
    int block_tokens; // of a block; 1 for single tokens
    int max_splits;   // 1 for runs
    float *partial;   // [token, heads, max_splits, kLatentPitch]; with max_splits > 1
};

// The share of a token's tiles [first, last) that one split has.
struct LatentSplit {
    int n_splits;
    int first, last;

    __device__ __forceinline__ LatentSplit(int begin, int end, int max_splits, int split) {
        const int from = begin / kLatentKeys;
        const int to = end > begin ? (end + kLatentKeys - 1) / kLatentKeys : from;
        const int tiles = to - from;
        n_splits = max(1, min(max_splits, (tiles + kLatentSplitTiles - 1) / kLatentSplitTiles));
        const int each = (tiles + n_splits - 1) / n_splits;
        first = from + min(split * each, tiles);
        last = from + min((split + 1) * each, tiles);
    }
};

template <typename T, int RowTiles>
__global__ void __launch_bounds__(LatentShape<RowTiles>::kThreads)
    attention_latent_kernel(AttentionArgs args, LatentBlocks blocks) {
    using Shape = LatentShape<RowTiles>;
    constexpr int kRows = Shape::kRows, kThreads = Shape::kThreads;
    constexpr int kColumnWarps = Shape::kColumnWarps;
    constexpr int kKeyTiles = Shape::kWarpKeys / 8;
    constexpr int kChunks = kLatentDim / 8;
    extern __shared__ __align__(128) unsigned char shared[];
    __shared__ float warp_max[kColumnWarps][kRows], warp_sum_of[kColumnWarps][kRows];

    const int lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize;
    const int row_tile = warp / kColumnWarps, column_warp = warp % kColumnWarps;
    const int matrix = lane / 8;
    const int item = int(blockIdx.x) / blocks.max_splits;
    const int split = int(blockIdx.x) % blocks.max_splits;
    launch_dependents();
    grid_dependency_wait();

    int token0 = item, n_tokens = 1;
    if (blocks.runs != nullptr) {
        const int tile = int(gridDim.x) - 1 - item; // longest sequences first
        const int run_tokens = blocks.runs[2 * blockIdx.z + 1];
        token0 = blocks.runs[2 * blockIdx.z] + tile * blocks.block_tokens;
        n_tokens = min(blocks.block_tokens, run_tokens - tile * blocks.block_tokens);
    } else if (blocks.tokens != nullptr) {
        token0 = blocks.tokens[item];
    }
    if (n_tokens <= 0) {
        return;
    }
    const int head0 = int(blockIdx.y) * blocks.block_heads;
    const int n_heads = min(blocks.block_heads, blocks.heads - head0);
    const int n_rows = n_tokens * n_heads;
    int low = INT32_MAX, high = 0;
    for (int t = 0; t < n_tokens; ++t) {
        low = min(low, args.begin[token0 + t]);
        high = max(high, args.end[token0 + t]);
    }
    const LatentSplit part(low, high, blocks.max_splits, split);
    if (split >= part.n_splits) {
        return;
    }
    const int32_t *table = args.table_of(token0);
    const uint32_t queries = smem_address(shared);
    const uint32_t weights = queries + kRows * Shape::kRowBytes;
    const uint32_t tiles = weights + kRows * Shape::kWeightBytes;
    const T *cache = static_cast<const T *>(args.k);

    for (int i = threadIdx.x; i < kRows * kChunks; i += kThreads) {
        const int row = i / kChunks, chunk = i % kChunks;
        const bool is_there = row < n_rows;
        const int64_t at = is_there ? (token0 + row / n_heads) * args.q_token +
                                          (head0 + row % n_heads) * args.q_head + chunk * 8
                                    : 0;
        cp_async_16(queries + tile_offset<kLatentDim>(row, chunk),
                    static_cast<const T *>(args.q) + at, is_there);
    }
    const auto load_tile = [&](int tile, int stage) {
        const uint32_t to = tiles + uint32_t(stage * Shape::kTileBytes);
        for (int i = threadIdx.x; i < kLatentKeys * kChunks; i += kThreads) {
            const int row = i / kChunks, chunk = i % kChunks;
            const int e = tile * kLatentKeys + row;
            const bool is_there = e >= low && e < high;
            const int64_t slot = is_there ? args.slot_of(table, e) : 0;
            cp_async_16(to + tile_offset<kLatentDim>(row, chunk),
                        cache + slot * kLatentDim + chunk * 8, is_there);
        }
        cp_async_commit_group();
    };

    // Rows `rows[r]` of this thread: lane / 4 and lane / 4 + 8 of its row tile.
    int rows[2], begins[2], ends[2];
    for (int r = 0; r < 2; ++r) {
        rows[r] = row_tile * 16 + lane / 4 + 8 * r;
        const int token = token0 + min(rows[r] / n_heads, n_tokens - 1);
        begins[r] = args.begin[token];
        ends[r] = rows[r] < n_rows ? args.end[token] : 0;
    }
    float out[Shape::kWarpColumns / 8][4] = {};
    float top[2] = {-INFINITY, -INFINITY}, sum[2] = {};
    if (part.first < part.last) {
        load_tile(part.first, 0);
    } else {
        cp_async_commit_group(); // the queries
    }
    for (int tile = part.first, stage = 0; tile < part.last; ++tile, stage ^= 1) {
        cp_async_wait_group<0>();
        __syncthreads(); // the tile is there, and the other stage is free
        if (tile + 1 < part.last) {
            load_tile(tile + 1, stage ^ 1);
        }
        const uint32_t keys = tiles + uint32_t(stage * Shape::kTileBytes);
        float scores[kKeyTiles][4] = {};
#pragma unroll
        for (int step = 0; step < kLatentDim / 16; step += 2) {
            uint32_t q[2][4];
#pragma unroll
            for (int s = 0; s < 2; ++s) {
                const int row = row_tile * 16 + (matrix & 1) * 8 + lane % 8;
                ldmatrix_x4(q[s],
                            queries + tile_offset<kLatentDim>(row, (step + s) * 2 + (matrix >> 1)));
            }
#pragma unroll
            for (int key = 0; key < kKeyTiles; ++key) {
                uint32_t k[4]; // 8 entries, 32 values
                const int row = column_warp * Shape::kWarpKeys + key * 8 + lane % 8;
                ldmatrix_x4(k, keys + tile_offset<kLatentDim>(row, step * 2 + matrix));
                mma_m16n8k16<T>(scores[key], q[0], k[0], k[1]);
                mma_m16n8k16<T>(scores[key], q[1], k[2], k[3]);
            }
        }
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            float highest = -INFINITY;
#pragma unroll
            for (int key = 0; key < kKeyTiles; ++key) {
#pragma unroll
                for (int c = 0; c < 2; ++c) {
                    const int e = tile * kLatentKeys + column_warp * Shape::kWarpKeys + key * 8 +
                                  lane % 4 * 2 + c;
                    float &score = scores[key][2 * r + c];
                    score = e >= begins[r] && e < ends[r] ? score * args.scale_log2 : -INFINITY;
                    highest = fmaxf(highest, score);
                }
            }
            highest = fmaxf(highest, __shfl_xor_sync(kFullMask, highest, 1));
            highest = fmaxf(highest, __shfl_xor_sync(kFullMask, highest, 2));
            if (lane % 4 == 0) {
                warp_max[column_warp][rows[r]] = highest;
            }
        }
        __syncthreads();
        float rescale[2];
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            float now = top[r];
#pragma unroll
            for (int w = 0; w < kColumnWarps; ++w) {
                now = fmaxf(now, warp_max[w][rows[r]]);
            }
            const float safe = now == -INFINITY ? 0.0f : now;
            rescale[r] = exp2f(top[r] - safe);
            top[r] = now;
            sum[r] *= rescale[r];
#pragma unroll
            for (int key = 0; key < kKeyTiles; ++key) {
                const float a = exp2f(scores[key][2 * r] - safe);
                const float b = exp2f(scores[key][2 * r + 1] - safe);
                sum[r] += a + b;
                const uint32_t at =
                    uint32_t(rows[r] * Shape::kWeightBytes +
                             (column_warp * Shape::kWarpKeys + key * 8) * 2 + lane % 4 * 4);
                const uint32_t pair = pack_pair<T>(a, b);
                asm volatile("st.shared.b32 [%0], %1;" ::"r"(weights + at), "r"(pair) : "memory");
            }
        }
        if (__any_sync(kFullMask, rescale[0] != 1.0f || rescale[1] != 1.0f)) {
#pragma unroll
            for (int d = 0; d < Shape::kWarpColumns / 8; ++d) {
                out[d][0] *= rescale[0];
                out[d][1] *= rescale[0];
                out[d][2] *= rescale[1];
                out[d][3] *= rescale[1];
            }
        }
        __syncthreads();
#pragma unroll
        for (int step = 0; step < kLatentKeys / 16; ++step) {
            uint32_t p[4];
            const int p_row = row_tile * 16 + (matrix & 1) * 8 + lane % 8;
            ldmatrix_x4(p, weights + uint32_t(p_row * Shape::kWeightBytes +
                                              (step * 2 + (matrix >> 1)) * 16));
#pragma unroll
            for (int d = 0; d < Shape::kWarpColumns / 16; ++d) {
                uint32_t v[4];
                const int row = step * 16 + (matrix & 1) * 8 + lane % 8;
                const int chunk = (column_warp * Shape::kWarpColumns + d * 16) / 8 + (matrix >> 1);
                ldmatrix_x4_trans(v, keys + tile_offset<kLatentDim>(row, chunk));
                mma_m16n8k16<T>(out[2 * d], p, v[0], v[1]);
                mma_m16n8k16<T>(out[2 * d + 1], p, v[2], v[3]);
            }
        }
    }
    cp_async_wait_group<0>();
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        sum[r] += __shfl_xor_sync(kFullMask, sum[r], 1);
        sum[r] += __shfl_xor_sync(kFullMask, sum[r], 2);
        if (lane % 4 == 0) {
            warp_sum_of[column_warp][rows[r]] = sum[r];
        }
    }
    __syncthreads();
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        if (rows[r] >= n_rows) {
            continue;
        }
        float total = 0;
        for (int w = 0; w < kColumnWarps; ++w) {
            total += warp_sum_of[w][rows[r]];
        }
        const int head = head0 + rows[r] % n_heads;
        const int column = column_warp * Shape::kWarpColumns + lane % 4 * 2;
        if (part.n_splits > 1) {
            float *to =
                blocks.partial +
                ((int64_t(item) * blocks.heads + head) * blocks.max_splits + split) * kLatentPitch;
#pragma unroll
            for (int d = 0; d < Shape::kWarpColumns / 8; ++d) {
                *reinterpret_cast<float2 *>(to + column + d * 8) =
                    make_float2(out[d][2 * r], out[d][2 * r + 1]);
            }
            if (column_warp == 0 && lane % 4 == 0) {
                to[kLatentValues] = top[r];
                to[kLatentValues + 1] = total;
            }
            continue;
        }
        const float factor = total > 0 ? 1.0f / total : 0.0f;
        T *to = static_cast<T *>(args.out) + (token0 + rows[r] / n_heads) * args.out_token +
                head * args.out_head + column;
#pragma unroll
        for (int d = 0; d < Shape::kWarpColumns / 8; ++d) {
            *reinterpret_cast<uint32_t *>(to + d * 8) =
                pack_pair<T>(out[d][2 * r] * factor, out[d][2 * r + 1] * factor);
        }
    }
}

// One block per single token and head.
template <typename T>
__global__ void __launch_bounds__(kLatentCombineThreads)
    attention_latent_combine_kernel(AttentionArgs args, LatentBlocks blocks) {
    constexpr int kColumns = kLatentValues / kLatentCombineThreads;
    launch_dependents();
    grid_dependency_wait();
    const int item = int(blockIdx.x), head = int(blockIdx.y);
    const int token = blocks.tokens != nullptr ? blocks.tokens[item] : item;
    const int n = LatentSplit(args.begin[token], args.end[token], blocks.max_splits, 0).n_splits;
    if (n == 1) {
        return;
    }
    const float *from =
        blocks.partial + (int64_t(item) * blocks.heads + head) * blocks.max_splits * kLatentPitch;
    float highest = -INFINITY;
    for (int s = 0; s < n; ++s) {
        highest = fmaxf(highest, from[s * kLatentPitch + kLatentValues]);
    }
    const int column = int(threadIdx.x) * kColumns;
    float values[kColumns] = {};
    float total = 0;
    for (int s = 0; s < n && highest != -INFINITY; ++s) {
        const float *split = from + s * kLatentPitch;
        const float rescale = exp2f(split[kLatentValues] - highest);
        total += split[kLatentValues + 1] * rescale;
        const float4 part = *reinterpret_cast<const float4 *>(split + column);
        values[0] += part.x * rescale;
        values[1] += part.y * rescale;
        values[2] += part.z * rescale;
        values[3] += part.w * rescale;
    }
    const float factor = total > 0 ? 1.0f / total : 0.0f;
    T *to = static_cast<T *>(args.out) + token * args.out_token + head * args.out_head + column;
    const uint2 packed{pack_pair<T>(values[0] * factor, values[1] * factor),
                       pack_pair<T>(values[2] * factor, values[3] * factor)};
    *reinterpret_cast<uint2 *>(to) = packed;
}

// count: single tokens, or the most tiles of tokens of a run.
template <typename T, int RowTiles>
void launch_latent(const device::CudaStream &stream, const AttentionArgs &args,
                   const LatentBlocks &blocks, int64_t count, int64_t n_runs) {
    using Shape = LatentShape<RowTiles>;
    const auto kernel = attention_latent_kernel<T, RowTiles>;
    set_max_dynamic_smem(kernel, size_t(Shape::kSharedBytes));
    const dim3 grid(unsigned(count * blocks.max_splits), ceil_div(blocks.heads, blocks.block_heads),
                    unsigned(n_runs));
    launch(stream, kernel, grid, Shape::kThreads, size_t(Shape::kSharedBytes), true, args, blocks);
}

template <typename T> class LatentLauncher {
public:
    LatentLauncher(device::CudaStream &stream, const AttentionArgs &args)
        : stream_(stream), args_(args), heads_(args.group),
          has_large_(LatentShape<4>::kSharedBytes + kLatentStaticBytes <= stream.max_shared_bytes) {
    }

    // tokens null: 0 .. n - 1.
    void run_singles(const int32_t *tokens, int64_t n) {
        if (n == 0) {
            return;
        }
        const bool is_large = has_large_ && heads_ > 16;
        LatentBlocks blocks{};
        blocks.tokens = tokens;
        blocks.heads = heads_;
        blocks.block_heads = std::min(heads_, is_large ? 64 : 16);
        blocks.block_tokens = 1;
        const int64_t units = n * ceil_div(heads_, blocks.block_heads);
        const int64_t resident = (is_large ? 1 : 2) * int64_t(stream_.n_sms);
        blocks.max_splits = stream_.is_exact
                                ? kLatentExactSplits
                                : int(std::clamp<int64_t>(resident / units, 1, kLatentMaxSplits));
        if (blocks.max_splits > 1) {
            const int64_t floats = n * heads_ * blocks.max_splits * int64_t(kLatentPitch);
            blocks.partial =
                static_cast<float *>(stream_.scratch.at_least(size_t(floats) * sizeof(float)));
        }
        launch_rows(is_large, blocks, n, 1);
        if (blocks.max_splits > 1) {
            launch(stream_, attention_latent_combine_kernel<T>, dim3(unsigned(n), unsigned(heads_)),
                   kLatentCombineThreads, 0, true, args_, blocks);
        }
    }
    void run_runs(const AttentionRuns &runs) {
        if (runs.n_runs == 0) {
            return;
        }
        const int rows = has_large_ ? 64 : 16;
        LatentBlocks blocks{};
        blocks.runs = runs.runs.as<int32_t>();
        blocks.heads = heads_;
        blocks.block_heads = std::min(heads_, rows);
        blocks.block_tokens = rows / blocks.block_heads;
        blocks.max_splits = 1;
        launch_rows(has_large_, blocks, ceil_div(runs.longest, blocks.block_tokens), runs.n_runs);
    }

private:
    void launch_rows(bool is_large, const LatentBlocks &blocks, int64_t count, int64_t n_runs) {
        is_large ? launch_latent<T, 4>(stream_, args_, blocks, count, n_runs)
                 : launch_latent<T, 1>(stream_, args_, blocks, count, n_runs);
    }

    device::CudaStream &stream_;
    const AttentionArgs &args_;
    int heads_;
    bool has_large_; // shared memory for 64 rows
};

// n tokens; runs null: batch-invariant, every token alone.
template <typename T>
void run_latent(device::CudaStream &stream, const AttentionArgs &args, int64_t n,
                const AttentionRuns *runs) {
    if (runs != nullptr) {
        LatentLauncher<T> launcher(stream, args);
        const bool has_list = !runs->are_all_single && runs->singles.defined();
        launcher.run_singles(has_list ? runs->singles.as<int32_t>() : nullptr,
                             count_singles(*runs, n));
        return launcher.run_runs(*runs);
    }
    for_exact_tokens(args, n, [&](const AttentionArgs &part, int64_t count) {
        LatentLauncher<T>(stream, part).run_singles(nullptr, count);
    });
}

} // namespace llaisys::ops::cuda
