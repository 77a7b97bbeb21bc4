// Tiling and shared memory layout of gemm_tma_quant.cuh.
#pragma once

#include "ops/cuda/gemm_tma_m96_config.cuh"
#include "ops/cuda/quant_activations.cuh"
#include "ops/cuda/quant_decode.cuh"
#include "ops/cuda/tuning_sm90.hpp"

namespace llaisys::ops::cuda {

constexpr uint32_t kQuantTileBytes = 128; // codes of a row in a K tile

LLAISYS_HOST_DEVICE constexpr int quant_tile_values(QuantCodes codes) {
    return codes == QuantCodes::int4 ? 256 : 128;
}

// Rows of x per launch, rounded up; more columns need more registers: fewer atoms per block.
constexpr int quant_tma_columns(int64_t m) {
    return m <= 8 ? 8 : m <= 16 ? 16 : m <= 32 ? 32 : m <= 64 ? 64 : m <= 96 ? 96 : 128;
}
constexpr int quant_tma_atoms(int columns) { return columns <= 32 ? kM96MaxAtoms : 12; }
constexpr int quant_tma_threads(int columns) {
    return (quant_tma_atoms(columns) + 3) / 4 * 128 + 2 * kWarpSize;
}

// Largest M of a launch. int8: the sums take twice the registers.
constexpr int quant_tma_rows(QuantCodes codes) {
    return codes == QuantCodes::int8 ? 32 : codes == QuantCodes::int4 ? 128 : kM96MaxM;
}
struct QuantTmaConfig : AtomTiles {
    using AtomTiles::AtomTiles;
    int k, k_tiles, all_k_tiles; // k_tiles: of a block
    int planes, group_shift;
    int n_stages, prefetch_stages;
    int segment_bytes, tile_param_bytes; // of a row
    int x_sums_row;                      // bytes of sums per row of x and stage
    bool keeps_x;                        // the block quantises its part of x itself and keeps it
    uint32_t kept_at, kept_sums_at;      // planes and sums of a kept x, K tile after K tile
    uint32_t param_row;                  // bytes of parameters per row and stage; 0: none
    uint32_t weight_bytes, x_bytes;      // of a stage, transferred
    uint32_t x_at, params_at, x_sums_at, stage_bytes, sums_at, bytes;
};

inline QuantTmaConfig quant_tma_config(const device::CudaStream &stream,
                                       const QuantRowLayout &layout, const AtomRows &rows,
                                       int64_t k, int columns, int planes, bool keeps_x,
                                       const M96Tuning &tuning) {
    const int tile = quant_tile_values(layout.codes);
    QuantTmaConfig s(stream, tuning.cluster, rows.count, rows.atoms_per_head,
                     quant_tma_atoms(columns));
    s.k = int(k);
    s.all_k_tiles = int((k + tile - 1) / tile);
    s.k_tiles = (s.all_k_tiles + s.cluster - 1) / s.cluster;
    s.planes = planes;
    s.group_shift = group_shift(layout.group);
    s.segment_bytes = int(layout.segment_bytes(quant_segment(layout.codes)));
    s.tile_param_bytes = tile / layout.group * layout.param_bytes;
    s.param_row = layout.param_bytes > 0 ? uint32_t(std::max(16, s.tile_param_bytes)) : 0;
    const uint32_t x_planes = uint32_t(planes * (tile / 128) * columns) * kTmaRowBytes;
    s.x_sums_row =
        layout.codes == QuantCodes::int8 ? tile / quant_sum_values(layout) * int(sizeof(float)) : 0;
    const auto x_sums = uint32_t(columns * s.x_sums_row);
    const uint32_t codes = uint32_t(s.atoms) * kM96AtomBytes;
    const uint32_t params = uint32_t(s.atoms * 16) * s.param_row;
    s.weight_bytes = codes + params;
    s.keeps_x = keeps_x;
    s.x_bytes = keeps_x ? 0 : x_planes + x_sums;
    s.x_at = codes;
    s.params_at = codes + (keeps_x ? 0 : x_planes);
    s.x_sums_at = s.params_at + params;
    s.stage_bytes = (s.x_sums_at + (keeps_x ? 0 : x_sums) + 1023) / 1024 * 1024;
    const uint32_t kept = keeps_x ? uint32_t(s.k_tiles) * (x_planes + x_sums) : 0;
    // A warpgroup of four atoms may read past the last stage; those sums are dropped.
    const uint32_t past = uint32_t((s.atoms + 3) / 4 * 4) * kM96AtomBytes;
    const uint32_t exchange = s.exchange_bytes(columns);
    const uint32_t beyond = std::max(past, s.stage_bytes) - s.stage_bytes;
    const uint32_t rest = kM96BarrierBytes + beyond + exchange + kept + 1024;
    const auto room =
        uint32_t(std::min(tuning.buffer_bytes, size_t(stream.max_shared_bytes) - size_t(rest)));
    s.n_stages = std::min({std::max(2, int(room / s.stage_bytes)), s.k_tiles, kM96MaxStages});
    s.prefetch_stages = std::clamp(int(tuning.prefetch_bytes / s.weight_bytes), 1, s.n_stages);
    s.kept_at =
        (kM96BarrierBytes + uint32_t(s.n_stages) * s.stage_bytes + beyond + 1023) / 1024 * 1024;
    s.kept_sums_at = s.kept_at + uint32_t(s.k_tiles) * x_planes;
    s.sums_at = s.kept_at + kept;
    s.bytes = s.sums_at + exchange;
    return s;
}

// Blocks per cluster: least work of the most loaded block, where the exchange of a cluster counts
// as two K tiles.
inline M96Tuning quant_tma_tuning(const device::CudaStream &stream, const QuantRowLayout &layout,
                                  const AtomRows &rows, int64_t k, int columns) {
    M96Tuning best{1, 192 << 10, 192 << 10};
    int64_t least = INT64_MAX;
    for (int cluster = 1; cluster <= quant_max_cluster(columns); cluster *= 2) {
        M96Tuning tuning = best;
        tuning.cluster = cluster;
        const QuantTmaConfig s =
            quant_tma_config(stream, layout, rows, k, columns, 2, false, tuning);
        const int at_once = clusters_at_once(stream, cluster);
        const int64_t clusters = (s.n_atoms + s.atoms - 1) / s.atoms;
        const int64_t rounds = (clusters + at_once - 1) / at_once;
        // x of a K tile counts as its bytes.
        const int64_t stage = int64_t(s.weight_bytes) + s.x_bytes;
        const int64_t cost = rounds * (s.k_tiles + (cluster > 1 ? 2 : 0)) * stage;
        if (cost < least && s.bytes <= uint32_t(stream.max_shared_bytes)) {
            least = cost;
            best.cluster = cluster;
        }
    }
    return best;
}

// Whether a block quantises its part of x itself: short parts, which take less time than a kernel.
constexpr int64_t kQuantKeptBytes = 40 << 10; // of x in global memory
inline bool quant_tma_keeps_x(const device::CudaStream &stream, const QuantRowLayout &layout,
                              const AtomRows &rows, const GemmInput &in, const M96Tuning &tuning) {
    if (in.m > 8) {
        return false;
    }
    const QuantTmaConfig s = quant_tma_config(stream, layout, rows, in.k, 8, 2, true, tuning);
    const int64_t part = int64_t(s.k_tiles) * quant_tile_values(layout.codes);
    const int64_t bytes = in.residual != nullptr ? int64_t(in.m) * in.k * 4 : in.m * part * 2;
    return bytes <= kQuantKeptBytes && s.bytes <= uint32_t(stream.max_shared_bytes);
}

} // namespace llaisys::ops::cuda
