// Shared memory layout and pipeline size of gemm_small_m_bulk.cuh.
#pragma once

#include "ops/cuda/gemm_epilogue.cuh"
#include "ops/cuda/tuning_sm90.hpp"

#include <algorithm>

namespace llaisys::ops::cuda {

constexpr int kBulkMaxM = 16; // largest M
constexpr int kBulkConsumerWarps = 8;
constexpr int kBulkConsumerThreads = kBulkConsumerWarps * kWarpSize; // MMA threads
constexpr int kBulkProducerWarps = 2;
constexpr int kBulkStageK = 512; // values of k per stage
constexpr int kBulkWarpK = kBulkStageK / kBulkConsumerWarps;
constexpr uint32_t kBulkRowPitch = kBulkStageK * 2 + 64; // bytes between rows of a stage
constexpr int kBulkMinStages = 4;
constexpr int kBulkMaxStages = 16;

// Shared memory layout: stages, normalized x, partial sums, scratch, mbarriers.
struct BulkConfig {
    int n_stages, prefetch_stages;
    uint32_t stage_bytes, x_at, x_stride, sums_at, sums_pitch, scratch_at, barriers_at, bytes;
};

// exclusive_bytes: request that keeps a second block off the SM.
inline BulkConfig bulk_config(const GemmInput &in, int items, int most_units,
                              size_t exclusive_bytes, const BulkTuning &tuning) {
    const bool norms = in.residual != nullptr;
    const auto m = uint32_t(in.m);
    BulkConfig s{};
    s.stage_bytes = (2 * uint32_t(items) + (norms ? 0 : m)) * kBulkRowPitch;
    s.x_stride = uint32_t(in.k * 2 + 127) / 128 * 128 + 64;
    const uint32_t x_bytes = norms ? m * s.x_stride : 0;
    s.sums_pitch = m == 1 ? 1 : m + 1;
    const uint32_t sums_bytes = 2 * kBulkConsumerWarps * 16 * s.sums_pitch * 4;
    constexpr uint32_t kScratchBytes = 2 * kBulkConsumerWarps * 4 * 4;
    constexpr uint32_t kBarrierBytes = 2 * kBulkMaxStages * 8;
    const uint32_t rest = x_bytes + sums_bytes + kScratchBytes + kBarrierBytes;
    const int wanted = most_units * ((in.k + kBulkStageK - 1) / kBulkStageK);
    // Without the exclusive request two norm-fused blocks could share an SM that becomes free
    // early while another SM stays idle.
    const BulkNormConfig usual = norms ? bulk_norm_config(in.k, most_units, exclusive_bytes)
                                       : BulkNormConfig{kBulkSmemBytes, kBulkPrefetchBytes, 0};
    const size_t smem_bytes = tuning.smem_bytes > 0 ? tuning.smem_bytes : usual.smem_bytes;
    const size_t prefetch_bytes =
        tuning.prefetch_bytes > 0 ? tuning.prefetch_bytes : usual.prefetch_bytes;
    const int room = smem_bytes > rest ? int((smem_bytes - rest) / s.stage_bytes) : 0;
    s.n_stages = std::min({std::max(room, kBulkMinStages), wanted, kBulkMaxStages});
    s.prefetch_stages =
        std::clamp(int(prefetch_bytes / s.stage_bytes), std::min(1, s.n_stages), s.n_stages);
    s.x_at = uint32_t(s.n_stages) * s.stage_bytes;
    s.sums_at = s.x_at + x_bytes;
    s.scratch_at = s.sums_at + sums_bytes;
    s.barriers_at = (s.scratch_at + kScratchBytes + 15) / 16 * 16;
    s.bytes = std::max(s.barriers_at + kBarrierBytes, uint32_t(usual.min_bytes));
    return s;
}

} // namespace llaisys::ops::cuda
