// Tiling and copies of gemm_small_m_quant.cuh. A stage holds one segment of every weight row of a
// unit, one bulk copy per row with codes and parameters, and a part of x when x is streamed.
#pragma once

#include "ops/cuda/gemm_small_m_units.cuh"
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

constexpr size_t kQuantSmemBytes = 150 * 1000;   // of a block
constexpr size_t kQuantPrefetchBytes = 64 << 10; // loaded before grid_dependency_wait()

enum class SmallX { own, kept, streamed };
constexpr int64_t kSmallOwnValues = 16384; // of x that a block quantises, or one row

// scratch: sums of squares of the warps, for each row of an own x.
struct SmallConfig : UnitStages {
    uint32_t segment_bytes, last_segment_bytes, row_pitch;
    SmallX x;
    int group_shift; // of the rows of x: groups of the weights, at most a slice
    uint32_t scales_at;
};

inline SmallConfig small_config(const device::CudaStream &stream, const GemmInput &in,
                                const QuantRowLayout &layout, int items, int most_units, SmallX x,
                                int group_shift) {
    const int64_t segment = quant_segment(layout.codes);
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
    s.chunks = int((in.k + segment - 1) / segment);
    s.segment_bytes = uint32_t(layout.segment_bytes(std::min<int64_t>(segment, in.k)));
    s.last_segment_bytes = uint32_t(layout.segment_bytes(in.k - (s.chunks - 1) * segment));
    s.row_pitch = (s.segment_bytes + 127) / 128 * 128 + pitch;
    s.stage_bytes = 2 * uint32_t(items) * s.row_pitch + (is_streamed ? x_bytes_of(segment) : 0);
    constexpr uint32_t kScratchBytes = kQuantWarps * kQuantMaxM * 4;
    constexpr uint32_t kBarrierBytes = (2 * kQuantMaxStages + 1) * 8;
    const uint32_t rest =
        x_bytes + UnitStages::sums_bytes(kQuantWarps, in.m) + kScratchBytes + kBarrierBytes + 32;
    const auto most = size_t(stream.max_shared_bytes);
    const auto stages_in = [&](size_t bytes) {
        return bytes > rest ? int((bytes - rest) / s.stage_bytes) : 0;
    };
    const int room =
        std::min(std::max(stages_in(kQuantSmemBytes), kQuantMinStages), stages_in(most));
    s.n_stages = std::max(1, std::min({room, most_units * s.chunks, kQuantMaxStages}));
    s.prefetch_stages = std::clamp(int(kQuantPrefetchBytes / s.stage_bytes), 1, s.n_stages);
    // More than half: two blocks on one SM would leave another SM idle.
    s.place(kQuantWarps, in.m, x_bytes, kScratchBytes, kBarrierBytes, uint32_t(most / 2 + 1024));
    s.scales_at = s.x_at + uint32_t(SmallRows::values_bytes(in.m, in.k));
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

// Producer warp: lanes 0 to 15 copy the weight rows, the others a streamed x.
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
    const auto copy_x = [&](int segment, int stage) {
        if (group >= 2) {
            x.copy(segment, stages + uint32_t(stage) * shape.stage_bytes + x_at,
                   full + uint32_t(stage) * 8);
        }
    };
    const auto row_bytes = [&](int segment) {
        return segment + 1 == shape.chunks ? shape.last_segment_bytes : shape.segment_bytes;
    };
    produce_units(
        shape, own_units, full, empty, producer, is_weight,
        static_cast<const unsigned char *>(nullptr),
        [&](int unit) {
            const int64_t row = epilogue.row_index(unit, group, i);
            return row >= 0 ? w.bytes + row * w.row_bytes : nullptr;
        },
        [&](const unsigned char *from, int segment, int stage, bool has_input) {
            if (from != nullptr) {
                cp_async_bulk(stages + uint32_t(stage) * shape.stage_bytes + row_at,
                              from + int64_t(segment) * shape.segment_bytes, row_bytes(segment),
                              full + uint32_t(stage) * 8, policy);
            } else if (has_input) {
                copy_x(segment, stage);
            }
        },
        copy_x,
        [&](unsigned present, int segment) {
            return uint32_t(__popc(present)) * row_bytes(segment) + x.bytes(segment);
        });
}

} // namespace llaisys::ops::cuda
