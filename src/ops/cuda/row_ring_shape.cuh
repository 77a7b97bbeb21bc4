// Where things lie in the shared memory of the row ring (row_ring.cuh), and how much of it there is.
#pragma once

#include "ops/cuda/few_rows_types.cuh"

#include <algorithm>

namespace llaisys::ops::cuda {

constexpr int kRingRows = 16; // most rows of x
constexpr int kRingWarps = 8;
constexpr int kRingThreads = kRingWarps * kWarp; // that compute
constexpr int kRingCopiers = 2;                  // warps that copy
constexpr int kRingChunk = 512;                  // of k, a slot
constexpr int kRingWarpChunk = kRingChunk / kRingWarps;
constexpr uint32_t kRingStride = kRingChunk * 2 + 64; // bytes from row to row of a slot
constexpr int kRingLeastSlots = 4;
constexpr int kRingMostSlots = 16;

// What may be tried out; the defaults are what runs.
struct RingTuning {
    size_t block_bytes = 0; // 0: below
    size_t early_bytes = 0; // 0: below
};
constexpr size_t kEarlyStreamed = 54 << 10; // two or three slots of whole units
constexpr size_t kLargeRingBytes = 150 * 1000;

// Of a product that normalises, measured inside the steps of two models. A block of one of the narrow products
// (box_ring.cuh) must find room beside one of gate and up, and none beside one of q, k, v. With long rows and more
// under way the products around it are slower.
struct NormedRing {
    size_t block_bytes, early_bytes, least_bytes; // the last: that the block asks for
};
constexpr int kShortRow = 2048; // values
constexpr int kFewUnits = 4;    // of a block
inline NormedRing normed_ring(int k, int most_units, size_t alone_bytes) {
    if (k <= kShortRow) {
        return most_units <= kFewUnits ? NormedRing{132 << 10, 132 << 10, 150 << 10}
                                       : NormedRing{132 << 10, 90 << 10, alone_bytes};
    }
    return most_units <= kFewUnits ? NormedRing{150 << 10, 54 << 10, alone_bytes}
                                   : NormedRing{60 * 1000, 18 << 10, alone_bytes};
}

// Where things lie in shared memory: slots, x when it is normalised, sums, scratch, barriers.
struct RingShape {
    int n_slots, early_slots;
    uint32_t slot_bytes, x_at, x_stride, sums_at, sums_pitch, scratch_at, barriers_at, bytes;
};

// alone_bytes: what keeps a second block off the processor.
inline RingShape ring_shape(const FewRowsInput &in, int items, int most_units, size_t alone_bytes,
                            const RingTuning &tuning) {
    const bool norms = in.residual != nullptr;
    const auto m = uint32_t(in.m);
    RingShape s{};
    s.slot_bytes = (2 * uint32_t(items) + (norms ? 0 : m)) * kRingStride;
    s.x_stride = uint32_t(in.k * 2 + 127) / 128 * 128 + 64;
    const uint32_t x_bytes = norms ? m * s.x_stride : 0;
    s.sums_pitch = m == 1 ? 1 : m + 1;
    const uint32_t sums_bytes = 2 * kRingWarps * 16 * s.sums_pitch * 4;
    constexpr uint32_t kScratchBytes = 2 * kRingWarps * 4 * 4;
    constexpr uint32_t kBarrierBytes = 2 * kRingMostSlots * 8;
    const uint32_t rest = x_bytes + sums_bytes + kScratchBytes + kBarrierBytes;
    const int wanted = most_units * ((in.k + kRingChunk - 1) / kRingChunk);
    // Where a processor is free early, two blocks of a kernel that normalises would share it, and another
    // processor would have none.
    const NormedRing usual = norms ? normed_ring(in.k, most_units, alone_bytes)
                                   : NormedRing{kLargeRingBytes, kEarlyStreamed, 0};
    const size_t block_bytes = tuning.block_bytes > 0 ? tuning.block_bytes : usual.block_bytes;
    const size_t early_bytes = tuning.early_bytes > 0 ? tuning.early_bytes : usual.early_bytes;
    const int room = block_bytes > rest ? int((block_bytes - rest) / s.slot_bytes) : 0;
    s.n_slots = std::min({std::max(room, kRingLeastSlots), wanted, kRingMostSlots});
    s.early_slots = std::clamp(int(early_bytes / s.slot_bytes), std::min(1, s.n_slots), s.n_slots);
    s.x_at = uint32_t(s.n_slots) * s.slot_bytes;
    s.sums_at = s.x_at + x_bytes;
    s.scratch_at = s.sums_at + sums_bytes;
    s.barriers_at = (s.scratch_at + kScratchBytes + 15) / 16 * 16;
    s.bytes = std::max(s.barriers_at + kBarrierBytes, uint32_t(usual.least_bytes));
    return s;
}

} // namespace llaisys::ops::cuda
