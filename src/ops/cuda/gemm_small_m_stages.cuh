// Pipeline of gemm_small_m_quant.cuh: one block per SM, 16 consumer warps,
// 2 producer warps. A stage holds one segment of every weight row of a unit, one bulk copy per row
// with codes and parameters, and a part of x when x is streamed.
#pragma once

#include "ops/cuda/gemm_epilogue.cuh"
#include "ops/cuda/gemm_small_m_bulk_config.cuh"
#include "ops/cuda/mbarrier.cuh"
#include "ops/cuda/quant_decode.cuh"
#include "ops/cuda/quant_small_rows.cuh"

namespace llaisys::ops::cuda {

constexpr int kQuantMaxM = kBulkMaxM;
constexpr int kQuantWarps = 16; // consumers
constexpr int kQuantConsumers = kQuantWarps * kWarpSize;
constexpr int kQuantThreads = kQuantConsumers + kBulkProducerWarps * kWarpSize;
constexpr int kQuantBarrier = 8;          // of the consumers; norm_rows_to_smem uses lower ones
constexpr int kQuantMaxKeptX = 132 << 10; // bytes of x in shared memory
constexpr int kQuantMinStages = 3;
constexpr int kQuantMaxStages = 16;

enum class SmallX { own, kept, streamed };
constexpr int64_t kSmallOwnValues = 16384; // of x that a block quantises, or one row

// Shared memory layout: stages, x, sums of the warps, scratch, mbarriers. scratch: sums of squares of
// the warps, for each row of an own x.
struct SmallConfig {
    int n_stages, prefetch_stages, segments;
    uint32_t segment_bytes, last_segment_bytes, row_pitch, stage_bytes;
    uint32_t x_at, sums_at, sums_pitch, scratch_at, barriers_at, bytes;
    SmallX x;
    int group_shift; // of the rows of x: groups of the weights, at most a slice
    uint32_t scales_at;
};

inline SmallConfig small_config(const device::CudaStream &stream, const GemmInput &in,
                                const QuantRowLayout &layout, int items, int most_units, SmallX x,
                                int group_shift) {
    const int64_t segment = quant_segment(layout.codes);
    const auto m = uint32_t(in.m);
    const auto x_bytes_of = [&](int64_t values) {
        return uint32_t(SmallRows::values_bytes(in.m, values) +
                        SmallRows::scales_bytes(in.m, values, group_shift));
    };
    const bool is_streamed = x == SmallX::streamed;
    const uint32_t x_bytes = is_streamed ? 0 : x_bytes_of(in.k);
    // Bytes from a row of a stage to the next, modulo 128, so that the reads of the lanes hit
    // different banks: 4 bytes by 8 rows of 4 lanes (int4), 8 bytes by 4 rows (int8), 16 bytes by 2
    // rows.
    const uint32_t pitch = layout.codes == QuantCodes::int4   ? 16
                           : layout.codes == QuantCodes::int8 ? 32
                                                              : 64;
    SmallConfig s{};
    s.x = x;
    s.group_shift = group_shift;
    s.segments = int((in.k + segment - 1) / segment);
    s.segment_bytes = uint32_t(layout.segment_bytes(std::min<int64_t>(segment, in.k)));
    s.last_segment_bytes = uint32_t(layout.segment_bytes(in.k - (s.segments - 1) * segment));
    s.row_pitch = (s.segment_bytes + 127) / 128 * 128 + pitch;
    s.stage_bytes = 2 * uint32_t(items) * s.row_pitch + (is_streamed ? x_bytes_of(segment) : 0);
    s.sums_pitch = m == 1 ? 1 : m + 1;
    const uint32_t sums_bytes = 2 * kQuantWarps * 16 * s.sums_pitch * 4;
    constexpr uint32_t kScratchBytes = kQuantWarps * kQuantMaxM * 4;
    constexpr uint32_t kBarrierBytes = (2 * kQuantMaxStages + 1) * 8;
    const uint32_t rest = x_bytes + sums_bytes + kScratchBytes + kBarrierBytes + 32;
    const auto most = size_t(stream.max_shared_bytes);
    const auto stages_in = [&](size_t bytes) {
        return bytes > rest ? int((bytes - rest) / s.stage_bytes) : 0;
    };
    const int room =
        std::min(std::max(stages_in(kQuantSmemBytes), kQuantMinStages), stages_in(most));
    s.n_stages = std::max(1, std::min({room, most_units * s.segments, kQuantMaxStages}));
    s.prefetch_stages = std::clamp(int(kQuantPrefetchBytes / s.stage_bytes), 1, s.n_stages);
    s.x_at = uint32_t(s.n_stages) * s.stage_bytes;
    s.scales_at = s.x_at + uint32_t(SmallRows::values_bytes(in.m, in.k));
    s.sums_at = s.x_at + x_bytes;
    s.scratch_at = s.sums_at + sums_bytes;
    s.barriers_at = (s.scratch_at + kScratchBytes + 15) / 16 * 16;
    // More than half: two blocks on one SM would leave another SM idle.
    s.bytes = std::max(s.barriers_at + kBarrierBytes, uint32_t(most / 2 + 1024));
    return s;
}

// Lane 16 of a producer warp copies a streamed x.
struct StreamedX {
    SmallRows rows;
    int segment_values, k;
    bool is_used;

    __device__ __forceinline__ int values(int segment) const {
        return min(segment_values, k - segment * segment_values);
    }
    __device__ __forceinline__ uint32_t values_bytes(int n) const {
        return uint32_t(rows.m * n * 2);
    }
    __device__ __forceinline__ uint32_t scales_bytes(int n) const {
        return uint32_t(((rows.m * n >> rows.group_shift) * 8 + 15) / 16 * 16);
    }
    __device__ __forceinline__ uint32_t bytes(int segment) const {
        const int n = values(segment);
        return is_used ? values_bytes(n) + scales_bytes(n) : 0;
    }
    __device__ __forceinline__ void copy(int segment, uint32_t to, uint32_t barrier) const {
        if (!is_used || threadIdx.x % kWarpSize != 16) {
            return;
        }
        const int n = values(segment);
        const int64_t before = int64_t(segment) * segment_values * rows.m;
        const uint64_t policy = l2_evict_last_policy();
        cp_async_bulk(to, rows.values + before * 2, values_bytes(n), barrier, policy);
        cp_async_bulk(to + values_bytes(segment_values), rows.scales + (before >> rows.group_shift),
                      scales_bytes(n), barrier, policy);
    }
};

// Producer warp: fills every kBulkProducerWarps-th stage from stage `producer` on. Lanes 0 to 15
// copy the weight rows, the others a streamed x.
template <typename Epilogue>
__device__ __forceinline__ void produce_quant_stages(const QuantMatrix &w, const Epilogue &epilogue,
                                                     const StreamedX &x, int own_units,
                                                     const SmallConfig &shape, uint32_t stages,
                                                     uint32_t full, uint32_t empty, int producer) {
    const int lane = threadIdx.x % kWarpSize;
    const int group = lane / 8;
    const int i = lane % 8;
    const bool is_weight = group < 2 && i < epilogue.items;
    const uint32_t row_at = uint32_t(group * epilogue.items + i) * shape.row_pitch;
    const uint32_t x_at = 2 * uint32_t(epilogue.items) * shape.row_pitch;
    const uint64_t policy = l2_evict_first_policy();
    const int total = own_units * shape.segments;
    const int n_early = min(shape.prefetch_stages, total); // at most n_stages
    const auto copy_x = [&](int segment, int stage) {
        if (group >= 2) {
            x.copy(segment, stages + uint32_t(stage) * shape.stage_bytes + x_at,
                   full + uint32_t(stage) * 8);
        }
    };
    const auto copy_early_x = [&] { // of the prefetched stages
        grid_dependency_wait();
        for (int e = producer; e < n_early; e += kBulkProducerWarps) {
            copy_x(e % shape.segments, e);
        }
    };
    bool has_input = false;
    int unit_at = -1; // unit of `from`
    const unsigned char *from = nullptr;
    int stage = producer;
    uint32_t round = 0;
    for (int s = producer; s < total; s += kBulkProducerWarps) {
        if (s >= n_early && !has_input) {
            copy_early_x();
            has_input = true;
        }
        const int segment = s % shape.segments;
        if (is_weight && s / shape.segments != unit_at) {
            unit_at = s / shape.segments;
            const int64_t row =
                epilogue.row_index(int(blockIdx.x) + unit_at * int(gridDim.x), group, i);
            from = row >= 0 ? w.bytes + row * w.row_bytes : nullptr;
        }
        if (round > 0) {
            mbarrier_wait_parity(empty + uint32_t(stage) * 8, (round - 1) & 1);
        }
        const unsigned present = __ballot_sync(kFullMask, from != nullptr);
        const uint32_t bytes =
            segment + 1 == shape.segments ? shape.last_segment_bytes : shape.segment_bytes;
        if (lane == 0) {
            mbarrier_arrive_expect_tx(full + uint32_t(stage) * 8,
                                      uint32_t(__popc(present)) * bytes + x.bytes(segment));
        }
        __syncwarp();
        if (from != nullptr) {
            cp_async_bulk(stages + uint32_t(stage) * shape.stage_bytes + row_at,
                          from + int64_t(segment) * shape.segment_bytes, bytes,
                          full + uint32_t(stage) * 8, policy);
        } else if (s >= n_early) {
            copy_x(segment, stage);
        }
        stage += kBulkProducerWarps;
        if (stage >= shape.n_stages) {
            stage -= shape.n_stages;
            ++round;
        }
    }
    if (!has_input) {
        copy_early_x();
    }
}

} // namespace llaisys::ops::cuda
