// The items of cuda_prefill_wgmma.cuh, 128 rows of one key/value head each, and which block takes which.
//
// Items are numbered from the longest lists to the shortest: tile of its run (the last one first), run, head.
// As many blocks as there are processors take one of each round; rounds run forth and back, so that the first of
// one round is the last of the next. Of an odd number of rounds the last three go together such that their
// numbers add up to the same for every block: items of a prompt grow by the same step, so the lists do too.
#pragma once

#include "ops/attention/cuda_args.cuh"

#include <algorithm>

namespace llaisys::ops::cuda {

constexpr int kWgmmaRows = 128;  // of an item
constexpr int kWgmmaKeys = 128;  // of a tile
constexpr int kWgmmaGroup = 128; // threads of a warpgroup
constexpr int kQuestions = 2;    // items whose queries are in shared memory

struct WgmmaItems {
    const int32_t *runs; // [n_runs, 2]: first token and number of tokens
    int32_t n_tiles;     // of the longest run
    int32_t n_runs;
    int32_t count; // some of them are empty, where runs differ
    int32_t n_blocks, n_rounds;
    bool are_three; // the last rounds

    // The item that a block takes in a round; some are beyond the last one.
    __host__ __device__ int of_block(int block, int round) const {
        const int left = n_rounds - round;
        int place = round % 2 == 0 ? block : n_blocks - 1 - block;
        if (are_three && left == 2) {
            place = (block % 2 == 0 ? (n_blocks + 1) / 2 : n_blocks) - 1 - block / 2;
        } else if (are_three && left == 1) {
            place = (block % 2 == 0 ? n_blocks : n_blocks / 2) - 1 - block / 2;
        }
        return round * n_blocks + place;
    }
};

// All items of runs of `longest` tokens at most, for at most so many blocks.
inline WgmmaItems wgmma_items(const AttentionArgs &args, const int32_t *runs, int64_t n_runs,
                              int64_t longest, int most_blocks) {
    WgmmaItems items{};
    items.runs = runs;
    items.n_tiles = int32_t(blocks_for(longest, kWgmmaRows / args.group));
    items.n_runs = int32_t(n_runs);
    items.count = items.n_tiles * items.n_runs * args.kv_heads;
    items.n_blocks = std::min(items.count, most_blocks);
    items.n_rounds = int32_t(blocks_for(items.count, items.n_blocks));
    const int in_last = items.count - (items.n_rounds - 1) * items.n_blocks;
    items.are_three =
        items.n_rounds >= 3 && items.n_rounds % 2 == 1 && 2 * in_last >= items.n_blocks;
    return items;
}

// One block a processor, which stays; where many items are empty (n_tokens: of all runs) a block for each, so
// that whoever is free takes the next.
inline int wgmma_most_blocks(int64_t n_runs, int64_t longest, int64_t n_tokens, int n_processors) {
    return n_runs * longest <= n_tokens + n_tokens / 8 ? n_processors : INT32_MAX;
}

// What is to be done for an item.
struct WgmmaSpan {
    int kv_head;
    int token0, n_tokens;                         // of its rows; 0 tokens: there are no more items
    int low_begin, high_begin, low_end, high_end; // smallest and largest begin and end of these
    int first_tile, last_tile;                    // at least one

    // Tiles of keys and of values.
    __device__ __forceinline__ int ring_items() const { return 2 * (last_tile - first_tile); }

    // The next item of this block from *round on, by a whole warp; false: there is none.
    __device__ __forceinline__ bool take(const AttentionArgs &args, const WgmmaItems &items,
                                         int *round) {
        const int tile_tokens = kWgmmaRows / args.group;
        for (n_tokens = 0; n_tokens <= 0 && *round < items.n_rounds; ++*round) {
            const int item = items.of_block(int(blockIdx.x), *round);
            if (item >= items.count) {
                continue;
            }
            const int tile_of_run = item / args.kv_heads;
            kv_head = item - tile_of_run * args.kv_heads;
            const int at = items.n_runs == 1 ? tile_of_run : tile_of_run / items.n_runs;
            const int32_t *run = items.runs + 2 * (tile_of_run - at * items.n_runs);
            const int tile = items.n_tiles - 1 - at;
            token0 = run[0] + tile * tile_tokens;
            n_tokens = min(tile_tokens, run[1] - tile * tile_tokens);
        }
        n_tokens = max(n_tokens, 0);
        if (n_tokens == 0) {
            return false;
        }
        low_begin = low_end = INT32_MAX;
        high_begin = high_end = 0;
        for (int t = threadIdx.x % kWarp; t < n_tokens; t += kWarp) {
            const int begin = args.begin[token0 + t];
            const int end = args.end[token0 + t];
            low_begin = min(low_begin, begin);
            high_begin = max(high_begin, begin);
            low_end = min(low_end, end);
            high_end = max(high_end, end);
        }
        low_begin = __reduce_min_sync(kAll, low_begin);
        high_begin = __reduce_max_sync(kAll, high_begin);
        low_end = __reduce_min_sync(kAll, low_end);
        high_end = __reduce_max_sync(kAll, high_end);
        first_tile = low_begin / kWgmmaKeys;
        last_tile = max(first_tile + 1, (high_end + kWgmmaKeys - 1) / kWgmmaKeys);
        return true;
    }
};

} // namespace llaisys::ops::cuda
