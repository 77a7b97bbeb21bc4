// Launches the attention kernels of one dtype and head_dim.
#pragma once

#include "ops/attention/cuda_decode_launch.cuh"
#include "ops/attention/cuda_prefill.cuh"
#include "ops/attention/cuda_prefill_wgmma.cuh"
#include "ops/attention/op.hpp"
#include "ops/cuda/dispatch.cuh"

#include <algorithm>

namespace llaisys::ops::cuda {

// head_dim with wgmma kernels and deeper decode pipelines; the others use mma.sync.
template <int D> constexpr bool kHasWgmma = D == 64 || D == 128;

// Query tokens of a batch-invariant launch: bounds the split workspace without clusters.
constexpr int64_t kExactTokens = 256;

template <typename T, int D>
void run_prefill(const device::CudaStream &stream, const AttentionArgs &args,
                 const AttentionRuns &runs) {
    const auto kernel = attention_prefill_kernel<T, D>;
    constexpr auto kBytes = size_t(prefill_shared_bytes<D>());
    set_max_dynamic_smem(kernel, kBytes);
    const dim3 grid(ceil_div(runs.longest, kPrefillRows / args.group), unsigned(args.kv_heads),
                    unsigned(runs.n_runs));
    launch(stream, kernel, grid, kPrefillThreads, kBytes, false, args, runs.runs.as<int32_t>());
}

// n_tokens: of all runs.
template <typename T, int D>
void run_wgmma(const device::CudaStream &stream, const AttentionArgs &args,
               const AttentionRuns &runs, int64_t n_tokens, int64_t n_slots) {
    const auto kernel = attention_wgmma_kernel<T, D>;
    constexpr auto kBytes = size_t(wgmma_shared_bytes<D>());
    set_max_dynamic_smem(kernel, kBytes);
    const int most_blocks = wgmma_grid_limit(runs.n_runs, runs.longest, n_tokens, stream.n_sms);
    const TileScheduler items =
        tile_scheduler(args, runs.runs.as<int32_t>(), runs.n_runs, runs.longest, most_blocks);
    launch(stream, kernel, unsigned(items.n_blocks), kWgmmaThreads, kBytes, true, args, items,
           paged_kv_maps<T, D>(args, n_slots));
}

// Calls run(args, count) for at most kExactTokens of n query tokens of 16-bit values at a time.
template <typename Run> void for_exact_tokens(AttentionArgs args, int64_t n, const Run &run) {
    for (int64_t first = 0; first < n; first += kExactTokens) {
        const int64_t count = std::min(kExactTokens, n - first);
        run(args, count);
        args.q = static_cast<const char *>(args.q) + count * args.q_token * 2;
        args.out = static_cast<char *>(args.out) + count * args.out_token * 2;
        args.q_rows += count;
        args.begin += count;
        args.end += count;
    }
}

// Single tokens of n.
inline int64_t count_singles(const AttentionRuns &runs, int64_t n) {
    return runs.are_all_single ? n : runs.n_singles;
}

// Calls run(tokens, n, are_long) for the single tokens of a launch of n tokens. Long sequences come
// first. They have a launch of their own if it gives them more blocks.
template <typename Run>
void for_singles(const device::CudaStream &stream, const AttentionArgs &args,
                 const AttentionRuns &runs, int64_t n, const Run &run) {
    const int32_t *singles = runs.singles.defined() ? runs.singles.as<int32_t>() : nullptr;
    const int64_t n_singles = count_singles(runs, n);
    const int64_t n_long = singles != nullptr && runs.n_long > 0 &&
                                   decode_clusters(stream, runs.n_long * args.kv_heads) > 1
                               ? std::min(runs.n_long, n_singles)
                               : 0;
    if (n_long > 0) {
        run(singles, n_long, true);
    }
    if (n_singles > n_long) {
        run(n_long > 0 ? singles + n_long : singles, n_singles - n_long, false);
    }
}

template <typename T, int D>
void run_singles(device::CudaStream &stream, const AttentionArgs &args, const int32_t *tokens,
                 int64_t n, bool are_long) {
    args.group <= 8 ? run_decode<T, D, 1>(stream, args, tokens, n, are_long)
                    : run_decode<T, D, 2>(stream, args, tokens, n, are_long);
}

template <typename T, int D>
void run_attention(device::CudaStream &stream, const AttentionArgs &args, int64_t n,
                   int64_t n_slots, const AttentionRuns &runs) {
    for_singles(stream, args, runs, n, [&](const int32_t *tokens, int64_t count, bool are_long) {
        run_singles<T, D>(stream, args, tokens, count, are_long);
    });
    if constexpr (kHasWgmma<D>) {
        if (runs.n_runs > 0 && has_wgmma(stream)) {
            run_wgmma<T, D>(stream, args, runs, n - count_singles(runs, n), n_slots);
            return;
        }
    }
    if (runs.n_runs > 0) {
        run_prefill<T, D>(stream, args, runs);
    }
}

// Arguments of a launch for any dtype; runs null: batch-invariant.
struct AttentionLaunch {
    device::CudaStream &stream;
    const AttentionArgs &args;
    DType dtype;
    int64_t n, n_slots;
    const AttentionRuns *runs;
};

using LaunchAttention = void (*)(const AttentionLaunch &);

template <int D> void launch_attention(const AttentionLaunch &l) {
    dispatch_half(l.dtype, [&](auto type) {
        using T = decltype(type);
        if (l.runs != nullptr) {
            return run_attention<T, D>(l.stream, l.args, l.n, l.n_slots, *l.runs);
        }
        // Every token as a decode token, independent of adjacent tokens.
        for_exact_tokens(l.args, l.n, [&](const AttentionArgs &args, int64_t count) {
            run_singles<T, D>(l.stream, args, nullptr, count, false);
        });
    });
}

// Each in a file of its own (cuda_head_dim_*.cu): they compile in parallel.
extern template void launch_attention<80>(const AttentionLaunch &);
extern template void launch_attention<96>(const AttentionLaunch &);
extern template void launch_attention<112>(const AttentionLaunch &);
extern template void launch_attention<192>(const AttentionLaunch &);
extern template void launch_attention<256>(const AttentionLaunch &);

// Calls f(std::integral_constant) with a head_dim that has kernels.
template <typename F> void dispatch_head_dim(int64_t head_dim, const F &f) {
    dispatch_int<64, 80, 96, 112, 128, 192, 256>(head_dim, f);
}

// Keys of kLatentDim values that contain kLatentValues values, for one KV head (cuda_latent.cu).
constexpr int kLatentDim = 576;
constexpr int kLatentValues = 512;
bool has_latent_attention(const device::CudaStream &stream); // enough shared memory
void launch_latent_attention(const AttentionLaunch &launch);

// Shared memory per block that the largest of these needs: head_dim 256.
constexpr int kLargeHeadSmem = 160 << 10;

} // namespace llaisys::ops::cuda
