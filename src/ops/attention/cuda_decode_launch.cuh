// Selects and launches the kernels of decode attention (cuda_decode.cuh) by the number of pairs of
// token and KV head.
#pragma once

#include "ops/attention/cuda_decode.cuh"

#include <algorithm>
#include <type_traits>

namespace llaisys::ops::cuda {

// Warps of a block and pipeline stages of each.
struct DecodeShape {
    int warps; // kDecodeWarps, or 2 without splits
    int stages;
};

// Overrides for tuning runs; 0 selects the default.
struct DecodeTuning {
    int clusters = 0; // per token and KV head
    int stages = 0;   // pipeline stages per warp, 2 or 3
    int warps = 0;    // per block, 2 or 4
};

// Splits per cluster: blocks_per_sm blocks per SM in all, a power of two within the cluster limit.
// Batch-invariant streams always use kMaxSplits.
inline int decode_splits(const device::CudaStream &stream, int64_t units, int blocks_per_sm = 2) {
    if (stream.is_exact) {
        return kMaxSplits;
    }
    const int64_t wanted = std::max<int64_t>(blocks_per_sm * stream.n_sms / units, 1);
    int n = 1;
    while (n * 2 <= std::min<int64_t>(wanted, kMaxSplits)) {
        n *= 2;
    }
    return n;
}

// Clusters of kMaxSplits blocks per token and KV head that fill the device, kDecodeBlocksPerSm blocks
// each. A cluster is placed within one GPC, which has at least 16 SMs.
constexpr int kDecodeBlocksPerSm = 2; // 3 are slower although they fit
inline int decode_clusters(const device::CudaStream &stream, int64_t units) {
    if (stream.is_exact || !stream.has_pdl) {
        return 1;
    }
    const int64_t resident = kDecodeBlocksPerSm * (stream.n_sms / 16 * 16) / kMaxSplits;
    return int(std::clamp<int64_t>(resident / units, 1, kMaxClusters));
}

// Shared memory of the largest launch.
template <typename Cache, int D, int HeadTiles, int Stages, int Warps = kDecodeWarps>
constexpr int max_decode_smem(bool has_clusters) {
    return kDecodePipelineBytes<Cache, D, Stages, Warps> +
           (has_clusters && Warps == kDecodeWarps ? combine_bytes<D>(8 * HeadTiles, kMaxSplits)
                                                  : 0);
}

template <typename T, typename Cache, int D, int HeadTiles, int Stages, bool Long,
          int Warps = kDecodeWarps>
void launch_decode(device::CudaStream &stream, const AttentionArgs &args, const int32_t *tokens,
                   int64_t n_tokens, int n_splits, int clusters) {
    const int64_t units = n_tokens * args.kv_heads;
    SplitKv splits{};
    splits.n = n_splits;
    splits.clusters = clusters;
    const bool has_clusters = stream.has_pdl;
    if (!has_clusters || clusters > 1) {
        const int64_t floats = has_clusters ? clusters * cluster_partial_floats<D>(args.group)
                                            : int64_t(splits.n) * 8 * HeadTiles * (D + 2);
        splits.partial =
            static_cast<float *>(stream.scratch.at_least(size_t(units * floats) * sizeof(float)));
        splits.counters = static_cast<int32_t *>(
            stream.counters.at_least(size_t(units * splits.n) * sizeof(int32_t)));
    }
    const auto kernel = attention_decode_kernel<T, Cache, D, HeadTiles, Stages, Long, Warps>;
    set_max_dynamic_smem(kernel,
                         size_t(max_decode_smem<Cache, D, HeadTiles, Stages, Warps>(has_clusters)));
    const int bytes = kDecodePipelineBytes<Cache, D, Stages, Warps> +
                      (has_clusters ? combine_bytes<D>(args.group, splits.n) : 0);
    const dim3 grid(unsigned(splits.n * clusters), unsigned(args.kv_heads), unsigned(n_tokens));
    launch(stream, kernel, grid, Warps * kWarpSize, size_t(bytes),
           {true, has_clusters ? unsigned(splits.n) : 1u}, args, tokens, splits);
}

// Blocks of all SMs that run at once, in clusters of n. Registers leave room for 16 warps per SM.
template <typename T, int D, int HeadTiles>
int64_t resident_decode_blocks(const device::CudaStream &stream, const DecodeShape &shape, int n) {
    constexpr int kOwnShared = 2 << 10; // upper bound of static and reserved shared memory
    const int bytes = shape.warps * shape.stages * int(DecodeTile<T, D>::kBytes) + kOwnShared +
                      (stream.has_pdl ? combine_bytes<D>(8 * HeadTiles, n) : 0);
    const int per_sm = std::min((stream.max_shared_bytes + (1 << 10)) / bytes, 16 / shape.warps);
    return int64_t(per_sm) * stream.n_sms;
}

// The deepest pipelines with which all blocks run at once; without any, three blocks per SM, which
// hide the start of a block behind the others. Blocks of few tokens should fit beside those of the
// previous and the next kernel. n: splits.
template <typename T, int D, int HeadTiles>
DecodeShape decode_shape(const device::CudaStream &stream, int64_t units, int n) {
    constexpr DecodeShape kDefault{kDecodeWarps, 2};
    if (2 * stream.n_sms / units >= 4) {
        return kDefault;
    }
    for (const DecodeShape shape :
         {DecodeShape{kDecodeWarps, 3}, kDefault, DecodeShape{2, 3}, DecodeShape{2, 2}}) {
        const bool is_allowed = shape.warps == kDecodeWarps || n == 1;
        if (is_allowed && units * n <= resident_decode_blocks<T, D, HeadTiles>(stream, shape, n)) {
            return shape;
        }
    }
    return kDefault;
}

// n_tokens decode tokens; `tokens`: their indices, null: 0 .. n_tokens - 1. are_long: their sequences
// are long enough for several clusters each.
template <typename T, int D, int HeadTiles>
void run_decode(device::CudaStream &stream, const AttentionArgs &args, const int32_t *tokens,
                int64_t n_tokens, bool are_long = false, const DecodeTuning &tuning = {}) {
    const int64_t units = n_tokens * args.kv_heads;
    const int clusters = tuning.clusters > 0 ? tuning.clusters
                         : are_long          ? decode_clusters(stream, units)
                                             : 1;
    if (clusters > 1) {
        launch_decode<T, T, D, HeadTiles, 2, true>(stream, args, tokens, n_tokens, kMaxSplits,
                                                   clusters);
        return;
    }
    const int n = decode_splits(stream, units);
    if constexpr (D == 64 || D == 128) {
        DecodeShape shape = decode_shape<T, D, HeadTiles>(stream, units, n);
        shape.warps = tuning.warps > 0 ? tuning.warps : shape.warps;
        shape.stages = tuning.stages > 0 ? tuning.stages : shape.stages;
        const auto launch_shape = [&](auto stages, auto warps) {
            launch_decode<T, T, D, HeadTiles, stages.value, false, warps.value>(
                stream, args, tokens, n_tokens, n, 1);
        };
        using Two = std::integral_constant<int, 2>;
        using Three = std::integral_constant<int, 3>;
        using All = std::integral_constant<int, kDecodeWarps>;
        if (shape.warps == kDecodeWarps) {
            return shape.stages == 3 ? launch_shape(Three{}, All{}) : launch_shape(Two{}, All{});
        }
        ensure(n == 1, "decode attention: two warps per block cannot split ", units,
               " pairs of token and KV head");
        return shape.stages == 3 ? launch_shape(Three{}, Two{}) : launch_shape(Two{}, Two{});
    }
    launch_decode<T, T, D, HeadTiles, 2, false>(stream, args, tokens, n_tokens, n, 1);
}

// The same over 8-bit caches. A stage has half the bytes and more instructions per byte: 3 stages of
// head_dim 128 leave room for 4 blocks per SM.
template <typename T, typename Format, int D, int HeadTiles>
void run_decode_bytes(device::CudaStream &stream, const AttentionArgs &args, const int32_t *tokens,
                      int64_t n_tokens, bool are_long = false, const DecodeTuning &tuning = {}) {
    constexpr int kStages = D > 128 ? 2 : 3;
    constexpr int kBlocksPerSm = D > 128 ? 2 : 4;
    const int64_t units = n_tokens * args.kv_heads;
    const int clusters = tuning.clusters > 0 ? tuning.clusters
                         : are_long          ? decode_clusters(stream, units)
                                             : 1;
    const int n = clusters > 1 ? kMaxSplits : decode_splits(stream, units, kBlocksPerSm);
    launch_decode<T, Format, D, HeadTiles, kStages, true>(stream, args, tokens, n_tokens, n,
                                                          clusters);
}

} // namespace llaisys::ops::cuda
