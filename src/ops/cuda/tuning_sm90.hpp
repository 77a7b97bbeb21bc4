// Settings of the GEMMs with few rows on compute capability 9.0, by shape class: the fastest inside
// decode steps of two models with hidden sizes 1,536 and 3,584 on an H200. Programs of
// test/cuda/native vary them; 0 in BulkTuning, GemvTuning and SplitKTuning selects the default.
#pragma once

#include <cstddef>
#include <cstdint>

namespace llaisys::ops::cuda {

// ---- gemv_sm90.cuh: one row ----

struct GemvTuning {
    int warps = 0;
    int k_splits = 0; // divides warps
    int k_block = 0;  // largest number of values per stage
    int stages = 0;   // per warp
    int late = 0;     // copies not yet issued when launch_dependents() is called
};
// Blocks use the large buffer if they fuse the norm and read many weights, or if K is long.
constexpr int64_t kGemvLargeBlockBytes = 400 * 1000; // weights per block
constexpr int kGemvLongK = 4096;                     // values of x
constexpr int kGemvLargeBufferBytes = 168 << 10;     // bytes
constexpr int kGemvBufferBytes = 84 << 10;           // bytes

// ---- gemm_small_m_bulk.cuh: up to 16 rows ----

struct BulkTuning {
    size_t smem_bytes = 0;     // of a block
    size_t prefetch_bytes = 0; // loaded before grid_dependency_wait()
};
constexpr size_t kBulkPrefetchBytes = 54 << 10; // two or three stages of full units
constexpr size_t kBulkSmemBytes = 150 * 1000;

// Pipeline of GEMMs with a fused norm. A block of gemm_tma_splitk.cuh must fit on the SM beside a
// gate/up block, and must not fit beside a q/k/v block. For long K, a larger prefetch slows the
// neighbouring GEMMs.
struct BulkNormConfig {
    size_t smem_bytes, prefetch_bytes, min_bytes; // min_bytes: requested at least
};
constexpr int kBulkShortK = 2048; // values
constexpr int kBulkFewUnits = 4;  // per block
inline BulkNormConfig bulk_norm_config(int k, int most_units, size_t exclusive_bytes) {
    if (k <= kBulkShortK) {
        return most_units <= kBulkFewUnits ? BulkNormConfig{132 << 10, 132 << 10, 150 << 10}
                                           : BulkNormConfig{132 << 10, 90 << 10, exclusive_bytes};
    }
    return most_units <= kBulkFewUnits ? BulkNormConfig{150 << 10, 54 << 10, exclusive_bytes}
                                       : BulkNormConfig{60 * 1000, 18 << 10, exclusive_bytes};
}

// ---- gemm_tma_splitk.cuh: up to 16 rows, added to the residual ----

struct SplitKTuning {
    int cluster = 0;
    size_t buffer_bytes = 0, prefetch_bytes = 0, stage_bytes = 0; // stage_bytes: approximate
};

// Wide outputs prefer a large pipeline that leaves no
// room for other blocks on the SM; narrow outputs prefer to share the SM.
constexpr int kSplitKWideN = 2048; // outputs
constexpr SplitKTuning kSplitKWide = {2, 190 << 10, 150 << 10, 24 << 10};
constexpr SplitKTuning kSplitKNarrow = {4, 80 << 10, 54 << 10, 12 << 10}; // m up to 8
constexpr SplitKTuning kSplitKNarrow16 = {8, 80 << 10, 36 << 10, 24 << 10};
// M = 1 with more weights: gemv_sm90.cuh is faster.
constexpr int64_t kSplitKMaxGemvWeights = 16 << 20;

// ---- gemm_tma_m96.cuh: 17 to 96 rows ----

struct M96Tuning {
    int cluster = 1;
    size_t buffer_bytes = 128 << 10, prefetch_bytes = 64 << 10;
    bool exclusive_sm = false; // at most one block per SM
};

// cluster 0: cuBLASLt is faster. m: rows of x; hidden: hidden size.
constexpr int64_t kM96LongK = 2048; // hidden size
inline M96Tuning m96_qkv_tuning(int64_t m, int64_t hidden) {
    if (hidden > kM96LongK) {
        return m <= 32   ? M96Tuning{2, 104 << 10, 96 << 10, true}
               : m <= 64 ? M96Tuning{4, 170 << 10, 128 << 10}
                         : M96Tuning{0};
    }
    return m <= 32   ? M96Tuning{4, 128 << 10, 32 << 10}
           : m <= 64 ? M96Tuning{4, 170 << 10, 128 << 10}
                     : M96Tuning{2, 112 << 10, 64 << 10};
}
inline M96Tuning m96_gate_up_tuning(int64_t m, int64_t hidden) {
    if (hidden > kM96LongK) {
        return {1, size_t(m <= 32 ? 205 : 170) << 10, 128 << 10, m > 64};
    }
    return {1, size_t(m <= 64 ? 128 : 170) << 10, 64 << 10, true};
}
inline M96Tuning m96_residual_tuning(int64_t m, int64_t hidden, int64_t k) {
    const bool is_down = k > 2 * hidden;
    if (hidden > kM96LongK) {
        if (is_down) {
            return m <= 32   ? M96Tuning{2, 170 << 10, 128 << 10}
                   : m <= 64 ? M96Tuning{2, 205 << 10, 64 << 10}
                             : M96Tuning{2, 170 << 10, 200 << 10};
        }
        return m <= 32 ? M96Tuning{4, 96 << 10, 64 << 10} : M96Tuning{0};
    }
    if (is_down) {
        return m <= 64 ? M96Tuning{4, 96 << 10, size_t(m <= 32 ? 32 : 96) << 10} : M96Tuning{0};
    }
    return m <= 32   ? M96Tuning{8, 80 << 10, 64 << 10}
           : m <= 64 ? M96Tuning{4, 112 << 10, 64 << 10}
                     : M96Tuning{2, 170 << 10, 64 << 10};
}

// ---- gemm_small_m_quant.cuh, gemm_tma_quant.cuh: quantized weights ----

constexpr size_t kQuantSmemBytes = 150 * 1000;   // of a block
constexpr size_t kQuantPrefetchBytes = 64 << 10; // loaded before grid_dependency_wait()

// Larger clusters are slower in decode steps; many rows of x are read once per cluster.
constexpr int quant_max_cluster(int columns) { return columns > 96 ? 4 : 2; }

} // namespace llaisys::ops::cuda
