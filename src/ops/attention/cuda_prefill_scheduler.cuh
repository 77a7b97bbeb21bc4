// Tile scheduler of cuda_prefill_wgmma.cuh: work tiles of 128 rows of one KV head, and their
// assignment to blocks.
//
// Work tiles are numbered from the longest KV ranges to the shortest: tile of its run (last
// first), run, head. One persistent block per SM takes one tile per round; the order alternates
// between rounds (boustrophedon). With an odd number of rounds the last three are permuted so
// that the tile numbers of every block have the same sum: causal tiles of a prompt grow linearly,
// so the work is balanced too.
#pragma once

#include "ops/attention/cuda_args.cuh"

#include <algorithm>

namespace llaisys::ops::cuda {

constexpr int kWgmmaRows = 128;  // rows of a work tile
constexpr int kWgmmaKeys = 128;  // keys of a KV tile
constexpr int kWgmmaGroup = 128; // threads of a warpgroup
constexpr int kQueryStages = 2;  // work tiles whose queries are in shared memory

struct TileScheduler {
    const int32_t *runs; // [n_runs, 2]: first token and number of tokens
    int32_t n_tiles;     // of the longest run
    int32_t n_runs;
    int32_t count; // includes empty tiles of shorter runs
    int32_t n_blocks, n_rounds;
    bool are_three; // permutation of the last three rounds

    // Work tile of a block in a round; may exceed the last tile.
    __host__ __device__ int work_of_block(int block, int round) const {
        const int left = n_rounds - round;
        int stage = round % 2 == 0 ? block : n_blocks - 1 - block;
        if (are_three && left == 2) {
            stage = (block % 2 == 0 ? (n_blocks + 1) / 2 : n_blocks) - 1 - block / 2;
        } else if (are_three && left == 1) {
            stage = (block % 2 == 0 ? n_blocks : n_blocks / 2) - 1 - block / 2;
        }
        return round * n_blocks + stage;
    }
};

// Scheduler for runs of at most `longest` tokens on at most `most_blocks` blocks.
inline TileScheduler tile_scheduler(const AttentionArgs &args, const int32_t *runs, int64_t n_runs,
                                    int64_t longest, int most_blocks) {
    TileScheduler scheduler{};
    scheduler.runs = runs;
    scheduler.n_tiles = int32_t(ceil_div(longest, kWgmmaRows / args.group));
    scheduler.n_runs = int32_t(n_runs);
    scheduler.count = scheduler.n_tiles * scheduler.n_runs * args.kv_heads;
    scheduler.n_blocks = std::min(scheduler.count, most_blocks);
    scheduler.n_rounds = int32_t(ceil_div(scheduler.count, scheduler.n_blocks));
    const int in_last = scheduler.count - (scheduler.n_rounds - 1) * scheduler.n_blocks;
    scheduler.are_three =
        scheduler.n_rounds >= 3 && scheduler.n_rounds % 2 == 1 && 2 * in_last >= scheduler.n_blocks;
    return scheduler;
}

// Grid size limit: one persistent block per SM. With many empty tiles (n_tokens: of all runs),
// one block per tile, scheduled by the hardware.
inline int wgmma_grid_limit(int64_t n_runs, int64_t longest, int64_t n_tokens, int n_sms) {
    return n_runs * longest <= n_tokens + n_tokens / 8 ? n_sms : INT32_MAX;
}

// Description of a work tile.
struct WorkTile {
    int kv_head;
    int token0, n_tokens; // 0 tokens: no more work
    // smallest and largest begin and end of the tokens
    int low_begin, high_begin, low_end, high_end;
    int first_tile, last_tile; // at least one tile

    // Number of key tiles plus value tiles.
    __device__ __forceinline__ int kv_tiles() const { return 2 * (last_tile - first_tile); }

    // Next work tile of this block from *round on, computed by a whole warp; false: none.
    __device__ __forceinline__ bool take(const AttentionArgs &args, const TileScheduler &scheduler,
                                         int *round) {
        const int tile_tokens = kWgmmaRows / args.group;
        for (n_tokens = 0; n_tokens <= 0 && *round < scheduler.n_rounds; ++*round) {
            const int item = scheduler.work_of_block(int(blockIdx.x), *round);
            if (item >= scheduler.count) {
                continue;
            }
            const int tile_of_run = item / args.kv_heads;
            kv_head = item - tile_of_run * args.kv_heads;
            const int at = scheduler.n_runs == 1 ? tile_of_run : tile_of_run / scheduler.n_runs;
            const int32_t *run = scheduler.runs + 2 * (tile_of_run - at * scheduler.n_runs);
            const int tile = scheduler.n_tiles - 1 - at;
            token0 = run[0] + tile * tile_tokens;
            n_tokens = min(tile_tokens, run[1] - tile * tile_tokens);
        }
        n_tokens = max(n_tokens, 0);
        if (n_tokens == 0) {
            return false;
        }
        low_begin = low_end = INT32_MAX;
        high_begin = high_end = 0;
        for (int t = threadIdx.x % kWarpSize; t < n_tokens; t += kWarpSize) {
            const int begin = args.begin[token0 + t];
            const int end = args.end[token0 + t];
            low_begin = min(low_begin, begin);
            high_begin = max(high_begin, begin);
            low_end = min(low_end, end);
            high_end = max(high_end, end);
        }
        low_begin = __reduce_min_sync(kFullMask, low_begin);
        high_begin = __reduce_max_sync(kFullMask, high_begin);
        low_end = __reduce_min_sync(kFullMask, low_end);
        high_end = __reduce_max_sync(kFullMask, high_end);
        first_tile = low_begin / kWgmmaKeys;
        last_tile = max(first_tile + 1, (high_end + kWgmmaKeys - 1) / kWgmmaKeys);
        return true;
    }
};

} // namespace llaisys::ops::cuda
