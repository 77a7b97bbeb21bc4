// Launches the attention kernels of one dtype and head_dim.
#pragma once

#include "ops/attention/cuda_decode.cuh"
#include "ops/attention/cuda_prefill.cuh"
#include "ops/attention/cuda_prefill_wgmma.cuh"
#include "ops/attention/op.hpp"
#include "ops/cuda/dispatch_dtype.cuh"

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

// Every token as a decode token, independent of adjacent tokens.
template <typename T, int D>
void run_attention_exact(device::CudaStream &stream, AttentionArgs args, int64_t n) {
    for (int64_t first = 0; first < n; first += kExactTokens) {
        const int64_t count = std::min(kExactTokens, n - first);
        if (args.group <= 8) {
            run_decode<T, D, 1>(stream, args, nullptr, count);
        } else {
            run_decode<T, D, 2>(stream, args, nullptr, count);
        }
        args.q = static_cast<const T *>(args.q) + count * args.q_token;
        args.out = static_cast<T *>(args.out) + count * args.out_token;
        args.q_rows += count;
        args.begin += count;
        args.end += count;
    }
}

template <typename T, int D>
void run_singles(device::CudaStream &stream, const AttentionArgs &args, const int32_t *tokens,
                 int64_t n, bool are_long) {
    if (n > 0 && args.group <= 8) {
        run_decode<T, D, 1>(stream, args, tokens, n, are_long);
    } else if (n > 0) {
        run_decode<T, D, 2>(stream, args, tokens, n, are_long);
    }
}

template <typename T, int D>
void run_attention(device::CudaStream &stream, const AttentionArgs &args, int64_t n,
                   int64_t n_slots, const AttentionRuns &runs) {
    const int32_t *singles = runs.singles.defined() ? runs.singles.as<int32_t>() : nullptr;
    const int64_t n_singles = runs.are_all_single ? n : runs.n_singles;
    // Long sequences come first. They have a launch of their own if it gives them more blocks.
    const int64_t n_long = singles != nullptr && runs.n_long > 0 &&
                                   decode_clusters(stream, runs.n_long * args.kv_heads) > 1
                               ? std::min(runs.n_long, n_singles)
                               : 0;
    run_singles<T, D>(stream, args, singles, n_long, true);
    run_singles<T, D>(stream, args, n_long > 0 ? singles + n_long : singles, n_singles - n_long,
                      false);
    if constexpr (kHasWgmma<D>) {
        if (runs.n_runs > 0 && has_wgmma(stream)) {
            run_wgmma<T, D>(stream, args, runs, n - n_singles, n_slots);
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
        l.runs == nullptr ? run_attention_exact<T, D>(l.stream, l.args, l.n)
                          : run_attention<T, D>(l.stream, l.args, l.n, l.n_slots, *l.runs);
    });
}

// Each in a file of its own (cuda_head_dim_*.cu): they compile in parallel.
void launch_attention_80(const AttentionLaunch &launch);
void launch_attention_96(const AttentionLaunch &launch);
void launch_attention_112(const AttentionLaunch &launch);
void launch_attention_192(const AttentionLaunch &launch);
void launch_attention_256(const AttentionLaunch &launch);

// Keys of kLatentDim values that contain kLatentValues values, for one KV head (cuda_latent.cu).
constexpr int kLatentDim = 576;
constexpr int kLatentValues = 512;
bool has_latent_attention(const device::CudaStream &stream); // enough shared memory
void launch_latent_attention(const AttentionLaunch &launch);

// Shared memory per block that the largest of these needs: head_dim 256.
constexpr int kLargeHeadSmem = 160 << 10;

} // namespace llaisys::ops::cuda
