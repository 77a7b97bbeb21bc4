// Pipeline of gemm_small_m_quant.cuh: one block per SM, 16 consumer warps,
// 2 producer warps. A stage holds one segment of every weight row of a unit, one bulk copy per row
// with codes and parameters, and a part of x when x is streamed.
#pragma once

#include "ops/cuda/gemm_epilogue.cuh"
#include "ops/cuda/gemm_small_m_bulk_config.cuh"
#include "ops/cuda/mbarrier.cuh"
#include "ops/cuda/quant_decode.cuh"

namespace llaisys::ops::cuda {

constexpr int kQuantMaxM = kBulkMaxM;
constexpr int kQuantWarps = 16; // consumers
constexpr int kQuantConsumers = kQuantWarps * kWarpSize;
constexpr int kQuantThreads = kQuantConsumers + kBulkProducerWarps * kWarpSize;
constexpr int kQuantBarrier = 8;          // of the consumers; norm_rows_to_smem uses lower ones
constexpr int kQuantMaxKeptX = 132 << 10; // bytes of x in shared memory
constexpr int kQuantMinStages = 3;
constexpr int kQuantMaxStages = 16;

constexpr size_t kQuantSmemBytes = 150 * 1000;   // of a block
constexpr size_t kQuantPrefetchBytes = 64 << 10; // loaded before grid_dependency_wait()

// Shared memory layout: stages, x, sums of the warps, scratch, mbarriers.
struct QuantStages {
    int n_stages, prefetch_stages, segments;
    uint32_t segment_bytes, last_segment_bytes, row_pitch, stage_bytes;
    uint32_t x_at, sums_at, sums_pitch, scratch_at, barriers_at, bytes;
};

// x_stage: bytes of x per stage; x_bytes: of x that is kept, a multiple of 16. pitch: bytes from a
// row of a stage to the next, modulo 128, so that the reads of the lanes hit different banks.
inline void set_quant_stages(QuantStages &s, const device::CudaStream &stream, const GemmInput &in,
                             const QuantRowLayout &layout, int items, int most_units,
                             uint32_t pitch, uint32_t x_stage, uint32_t x_bytes,
                             uint32_t scratch_bytes) {
    const int64_t segment = quant_segment(layout.codes);
    const auto m = uint32_t(in.m);
    s.segments = int((in.k + segment - 1) / segment);
    s.segment_bytes = uint32_t(layout.segment_bytes(std::min<int64_t>(segment, in.k)));
    s.last_segment_bytes = uint32_t(layout.segment_bytes(in.k - (s.segments - 1) * segment));
    s.row_pitch = (s.segment_bytes + 127) / 128 * 128 + pitch;
    s.stage_bytes = 2 * uint32_t(items) * s.row_pitch + x_stage;
    s.sums_pitch = m == 1 ? 1 : m + 1;
    const uint32_t sums_bytes = 2 * kQuantWarps * 16 * s.sums_pitch * 4;
    constexpr uint32_t kBarrierBytes = (2 * kQuantMaxStages + 1) * 8;
    const uint32_t rest = x_bytes + sums_bytes + scratch_bytes + kBarrierBytes + 32;
    const auto most = size_t(stream.max_shared_bytes);
    const auto stages_in = [&](size_t bytes) {
        return bytes > rest ? int((bytes - rest) / s.stage_bytes) : 0;
    };
    const int room =
        std::min(std::max(stages_in(kQuantSmemBytes), kQuantMinStages), stages_in(most));
    s.n_stages = std::max(1, std::min({room, most_units * s.segments, kQuantMaxStages}));
    s.prefetch_stages = std::clamp(int(kQuantPrefetchBytes / s.stage_bytes), 1, s.n_stages);
    s.x_at = uint32_t(s.n_stages) * s.stage_bytes;
    s.sums_at = s.x_at + x_bytes;
    s.scratch_at = s.sums_at + sums_bytes;
    s.barriers_at = (s.scratch_at + scratch_bytes + 15) / 16 * 16;
    // More than half: two blocks on one SM would leave another SM idle.
    s.bytes = std::max(s.barriers_at + kBarrierBytes, uint32_t(most / 2 + 1024));
}

// Initializes the mbarriers; by one thread.
__device__ __forceinline__ void init_quant_barriers(const QuantStages &shape, uint32_t full,
                                                    uint32_t empty) {
    for (int stage = 0; stage < shape.n_stages; ++stage) {
        mbarrier_init(full + uint32_t(stage) * 8, 1);
        mbarrier_init(empty + uint32_t(stage) * 8, kQuantWarps);
    }
}

// Part of x that is copied with the weights.
//   bytes(segment)               of all rows
//   copy(segment, to, barrier)   called by the lanes 16 to 31

// Producer warp: fills every kBulkProducerWarps-th stage from stage `producer` on. Lanes 0 to 15
// copy the weight rows, the others a streamed x.
template <typename X, typename Epilogue>
__device__ __forceinline__ void produce_quant_stages(const QuantMatrix &w, const Epilogue &epilogue,
                                                     const X &x, int own_units,
                                                     const QuantStages &shape, uint32_t stages,
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

// Adds the sums of the consumer warps, [2, kQuantWarps, 16, sums_pitch] floats, and stores outputs:
// item threadIdx.x % 8 of row threadIdx.x / 8 of x.
template <typename Epilogue>
__device__ __forceinline__ void
store_quant_unit(const Epilogue &epilogue, int unit, const float *sums, uint32_t pitch, int buffer,
                 float low_scale, float high_scale, const typename Epilogue::Operands &operands) {
    const int i = threadIdx.x % 8;
    const int row = threadIdx.x / 8;
    float low_sum = 0;
    float high_sum = 0;
#pragma unroll
    for (int of = 0; of < kQuantWarps; ++of) {
        const float *of_warp = sums + ((buffer * kQuantWarps + of) * 16 + i) * pitch + row;
        low_sum += of_warp[0];
        high_sum += of_warp[8 * pitch];
    }
    epilogue.store(unit, i, row, low_sum * low_scale, high_sum * high_scale,
                   epilogue.prepare(unit, i, operands));
}

} // namespace llaisys::ops::cuda
