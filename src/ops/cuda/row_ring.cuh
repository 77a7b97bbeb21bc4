// Products with 1 to 16 rows of x (few_rows_types.cuh) on compute capability 9: bound by reading the
// weights once.
//
// One block a processor, 8 warps that compute and two that copy. A slot of the ring holds 512 values
// of every weight row of a unit, one bulk copy each (1 KB, given up by the second-level cache first),
// and the same 512 of the rows of x where these have 16 bits; a barrier says when a slot is full,
// another when its readers are done. A warp issues its copies one after the other, so one alone would
// be the limit (74 % of the bandwidth); the two take turns at the slots. Four are slower again. Rows are 1,088 bytes apart, so that the 8 lanes of a 16-byte read
// meet different banks. A warp takes 64 of the 512 values; k is dealt to the operands in an order of
// its own, the same for both (a lane's 16 bytes). Sums: two chains a warp, then the warps in order, in
// shared memory. f32 rows are normalised into shared memory by each block for itself.
//
// Weights are on their way before the kernel waits for its input, but only `early_bytes` of them: the
// kernel before has copies of its own under way. More copies under way are not always better: a block
// with a long way to go is the fastest with a small ring, one with a short way with a large one, unless
// its rows are wide: then it has to fit beside the large ring of the kernel before. A row's
// bits depend on k alone, neither on how many rows nor on how many outputs there are.
#pragma once

#include "ops/cuda/bulk.cuh"
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
constexpr int kRingLongestNorm = 4 * 4 * kRingThreads; // values of a row that is normalised inside

// What may be tried out; the defaults are what runs.
struct RingTuning {
    size_t block_bytes = 0; // 0: of a length that fits the way, below
    size_t early_bytes = 0; // 0: below
};
constexpr size_t kEarlyNormed = 18 << 10;   // one slot of a whole unit
constexpr size_t kEarlyStreamed = 54 << 10; // two or three
constexpr size_t kShortWayBytes = 150 * 1000;
constexpr size_t kLongWayBytes = 60 * 1000;
constexpr int64_t kLongWay = 1536 << 10; // bytes of weights that one block reads
constexpr int kWideRow = 2048; // values: the products of wider rows all take the small ring

// Where things lie in shared memory: slots, x when it is normalised, sums, scratch, barriers.
struct RingShape {
    int n_slots, early_slots;
    uint32_t slot_bytes, x_at, x_stride, sums_at, sums_pitch, scratch_at, barriers_at, bytes;
};

inline RingShape ring_shape(const FewRowsInput &in, int items, int most_units,
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
    const int64_t way = int64_t(most_units) * 2 * items * in.k * 2;
    const bool is_small = norms && (way > kLongWay || in.k > kWideRow);
    const size_t block_bytes = tuning.block_bytes > 0 ? tuning.block_bytes
                               : is_small             ? kLongWayBytes
                                                      : kShortWayBytes;
    const size_t early_bytes = tuning.early_bytes > 0 ? tuning.early_bytes
                               : norms                ? kEarlyNormed
                                                      : kEarlyStreamed;
    const int room = block_bytes > rest ? int((block_bytes - rest) / s.slot_bytes) : 0;
    s.n_slots = std::min({std::max(room, kRingLeastSlots), wanted, kRingMostSlots});
    s.early_slots = std::clamp(int(early_bytes / s.slot_bytes), std::min(1, s.n_slots), s.n_slots);
    s.x_at = uint32_t(s.n_slots) * s.slot_bytes;
    s.sums_at = s.x_at + x_bytes;
    s.scratch_at = s.sums_at + sums_bytes;
    s.barriers_at = (s.scratch_at + kScratchBytes + 15) / 16 * 16;
    s.bytes = s.barriers_at + kBarrierBytes;
    return s;
}

// Fills every second slot of the ring, from slot `copier` on, one warp: lanes 0 to 15 copy the weight
// rows of a slot, the others those of x.
template <typename T, bool Streams, typename Use>
__device__ __forceinline__ void fill_ring(const FewRowsInput &in, const Use &use, int own_units,
                                          const RingShape &shape, uint32_t slots, uint32_t full,
                                          uint32_t empty, int copier) {
    const int lane = threadIdx.x % kWarp;
    const int group = lane / 8;
    const int i = lane % 8;
    const int x_row = lane - 16;
    const bool is_x = Streams && x_row >= 0 && x_row < in.m;
    const bool is_weight = group < 2 && i < use.items;
    const uint32_t to =
        slots + uint32_t(is_x ? 2 * use.items + x_row : group * use.items + i) * kRingStride;
    const uint64_t policy = is_x ? read_often() : read_once();
    const int chunks = (in.k + kRingChunk - 1) / kRingChunk;
    const int total = own_units * chunks;
    const int n_early = min(shape.early_slots, total); // at most n_slots
    const auto copy = [&](const T *from, int chunk, int slot) {
        const int first = chunk * kRingChunk;
        copy_bulk(to + uint32_t(slot) * shape.slot_bytes, from + first,
                  uint32_t(min(kRingChunk, in.k - first)) * 2, full + uint32_t(slot) * 8, policy);
    };
    const T *x = is_x ? static_cast<const T *>(in.x) + x_row * in.ldx : nullptr;
    const auto copy_early_x = [&] { // what the first slots still lack
        wait_for_input();
        for (int e = copier; is_x && e < n_early; e += kRingCopiers) {
            copy(x, e % chunks, e);
        }
    };
    bool has_input = false;
    int unit_at = -1; // of `from`
    const T *from = x;
    int slot = copier;
    uint32_t round = 0;
    for (int s = copier; s < total; s += kRingCopiers) {
        if (s >= n_early && !has_input) {
            copy_early_x();
            has_input = true;
        }
        const int chunk = s % chunks;
        if (is_weight && s / chunks != unit_at) {
            unit_at = s / chunks;
            from = use.row(int(blockIdx.x) + unit_at * int(gridDim.x), group, i);
        }
        if (round > 0) {
            barrier_wait(empty + uint32_t(slot) * 8, (round - 1) & 1);
        }
        const unsigned present = __ballot_sync(kAll, from != nullptr);
        if (lane == 0) {
            const int values = min(kRingChunk, in.k - chunk * kRingChunk);
            barrier_arrive_expecting(full + uint32_t(slot) * 8,
                                     uint32_t(__popc(present) * values) * 2);
        }
        __syncwarp();
        if (from != nullptr && (!is_x || s >= n_early)) {
            copy(from, chunk, slot);
        }
        slot += kRingCopiers;
        if (slot >= shape.n_slots) {
            slot -= shape.n_slots;
            ++round;
        }
    }
    if (!has_input) {
        copy_early_x();
    }
}

// Normalises the rows of the residual stream into shared memory; the threads that compute. Every
// thread has the same values of a row whatever the number of rows.
template <typename T, int Vectors>
__device__ __forceinline__ void norm_rows_inside(unsigned char *to, uint32_t stride,
                                                 const FewRowsInput &in, float *scratch,
                                                 const float4 (&scale)[Vectors]) {
    constexpr int kBatch = Vectors == 2 ? 4 : 2; // rows whose loads are under way together
    const int lane = threadIdx.x % kWarp;
    const int warp = threadIdx.x / kWarp;
    for (int first = 0; first < in.m; first += kBatch) {
        float4 values[kBatch][Vectors];
#pragma unroll
        for (int r = 0; r < kBatch; ++r) {
            const bool is_row = first + r < in.m;
            const float4 *from =
                reinterpret_cast<const float4 *>(is_row ? in.residual_row(first + r) : nullptr);
#pragma unroll
            for (int j = 0; j < Vectors; ++j) {
                const int at = threadIdx.x + j * kRingThreads;
                values[r][j] = is_row && at < in.k / 4 ? from[at] : make_float4(0, 0, 0, 0);
            }
        }
        float *sums = scratch + (first / kBatch & 1) * kRingWarps * 4;
#pragma unroll
        for (int r = 0; r < kBatch; ++r) {
            float sum = 0;
#pragma unroll
            for (int j = 0; j < Vectors; ++j) {
                const float4 v = values[r][j];
                sum += v.x * v.x + v.y * v.y + v.z * v.z + v.w * v.w;
            }
            sum = warp_sum(sum);
            if (lane == 0) {
                sums[warp * 4 + r] = sum;
            }
        }
        meet<1, kRingThreads>();
#pragma unroll
        for (int r = 0; r < kBatch; ++r) {
            float sum = 0;
#pragma unroll
            for (int w = 0; w < kRingWarps; ++w) {
                sum += sums[w * 4 + r];
            }
            const float factor = 1.0f / sqrtf(sum / float(in.k) + in.epsilon);
            auto *row = reinterpret_cast<uint2 *>(to + uint32_t(first + r) * stride);
#pragma unroll
            for (int j = 0; j < Vectors; ++j) {
                const int at = threadIdx.x + j * kRingThreads;
                const float4 v = values[r][j];
                const float4 w = scale[j];
                if (first + r < in.m && at < in.k / 4) {
                    row[at] = make_uint2(pack_pair<T>(v.x * factor * w.x, v.y * factor * w.y),
                                         pack_pair<T>(v.z * factor * w.z, v.w * factor * w.w));
                }
            }
        }
    }
    meet<1, kRingThreads>();
}

// NormVectors: of 4 values that a thread has of a row that is normalised; 0: x has 16 bits.
template <typename T, int NormVectors, typename Use>
__global__ void __launch_bounds__(kRingThreads + kRingCopiers * kWarp, 2)
    row_ring_kernel(FewRowsInput in, Use use, int n_units, RingShape shape) {
#if __CUDA_ARCH__ >= 900
    constexpr bool kStreams = NormVectors == 0;
    extern __shared__ __align__(128) unsigned char shared[];
    const uint32_t full = shared_address(shared) + shape.barriers_at;
    const uint32_t empty = full + uint32_t(shape.n_slots) * 8;
    const int lane = threadIdx.x % kWarp;
    const int warp = threadIdx.x / kWarp;
    const int own_units = (n_units - int(blockIdx.x) + int(gridDim.x) - 1) / int(gridDim.x);

    allow_next();
    if (warp == kRingWarps && lane == 0) {
        for (int slot = 0; slot < shape.n_slots; ++slot) {
            barrier_init(full + uint32_t(slot) * 8, 1);
            barrier_init(empty + uint32_t(slot) * 8, kRingWarps);
        }
        barriers_are_made();
    }
    float4 scale[kStreams ? 1 : NormVectors]; // a weight: it may be read early
    if constexpr (!kStreams) {
#pragma unroll
        for (int j = 0; j < NormVectors; ++j) {
            const int at = threadIdx.x + j * kRingThreads;
            scale[j] = warp < kRingWarps && at < in.k / 4
                           ? reinterpret_cast<const float4 *>(in.norm_weight)[at]
                           : make_float4(0, 0, 0, 0);
        }
    }
    __syncthreads(); // one place for all warps: an aligned barrier wants that
    if (warp >= kRingWarps) {
        fill_ring<T, kStreams>(in, use, own_units, shape, shared_address(shared), full, empty,
                               warp - kRingWarps);
        return;
    }
    const unsigned char *rows_of_x = shared + shape.x_at;
    wait_for_input();
    if constexpr (!kStreams) {
        norm_rows_inside<T>(shared + shape.x_at, shape.x_stride, in,
                            reinterpret_cast<float *>(shared + shape.scratch_at), scale);
    }

    const int chunks = (in.k + kRingChunk - 1) / kRingChunk;
    const int g = lane / 4;
    const int own_k = warp * kRingWarpChunk + lane % 4 * 8; // in a chunk
    // Rows of a group that a unit does not have: any other's, their sums are dropped.
    const uint32_t low_at = uint32_t(min(g, use.items - 1)) * kRingStride;
    const uint32_t high_at = low_at + uint32_t(use.items) * kRingStride;
    const bool stores = threadIdx.x < 8 * in.m;
    auto *sums = reinterpret_cast<float *>(shared + shape.sums_at);
    int slot = 0;
    uint32_t parity = 0;
    int buffer = 0;
    for (int unit = blockIdx.x; unit < n_units; unit += gridDim.x) {
        typename Use::Held held{};
        if (stores) {
            held = use.hold(unit, threadIdx.x % 8, threadIdx.x / 8);
        }
        float acc[2][2][4] = {}; // of 8 rows of x, and of the other 8; two chains each
        for (int chunk = 0; chunk < chunks; ++chunk) {
            barrier_wait(full + uint32_t(slot) * 8, parity);
            const unsigned char *at = shared + uint32_t(slot) * shape.slot_bytes;
#pragma unroll
            for (int step = 0; step < kRingWarpChunk / 32; ++step) {
                const int k = own_k + step * 32;
                const bool is_inside = chunk * kRingChunk + k < in.k;
                uint4 low{}, high{};
                if (is_inside) {
                    low = *reinterpret_cast<const uint4 *>(at + low_at + k * 2);
                    high = *reinterpret_cast<const uint4 *>(at + high_at + k * 2);
                }
                const uint32_t a0[4] = {low.x, high.x, low.y, high.y};
                const uint32_t a1[4] = {low.z, high.z, low.w, high.w};
#pragma unroll
                for (int tile = 0; tile < 2; ++tile) {
                    if (tile * 8 >= in.m) {
                        break;
                    }
                    const int row = tile * 8 + g;
                    uint4 x{};
                    if (is_inside && row < in.m) {
                        const unsigned char *from =
                            kStreams ? at + uint32_t(2 * use.items + row) * kRingStride + k * 2
                                     : rows_of_x + uint32_t(row) * shape.x_stride +
                                           (chunk * kRingChunk + k) * 2;
                        x = *reinterpret_cast<const uint4 *>(from);
                    }
                    mma<T>(acc[tile][step & 1], a0, x.x, x.y);
                    mma<T>(acc[tile][step & 1], a1, x.z, x.w);
                }
            }
            __syncwarp();
            if (lane == 0) {
                barrier_arrive(empty + uint32_t(slot) * 8);
            }
            if (++slot == shape.n_slots) {
                slot = 0;
                parity ^= 1;
            }
        }
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            const int tile = i / 4;
            const int c = i % 4;
            const int column = tile * 8 + lane % 4 * 2 + (c & 1);
            if (column < in.m) {
                sums[((buffer * kRingWarps + warp) * 16 + g + (c >> 1) * 8) * shape.sums_pitch +
                     column] = acc[tile][0][c] + acc[tile][1][c];
            }
        }
        // The buffer of the unit after the next is free once all are here again.
        meet<1, kRingThreads>();
        if (stores) {
            const int i = threadIdx.x % 8;
            const int row = threadIdx.x / 8;
            float low = 0;
            float high = 0;
#pragma unroll
            for (int w = 0; w < kRingWarps; ++w) {
                const float *of_warp =
                    sums + ((buffer * kRingWarps + w) * 16 + i) * shape.sums_pitch + row;
                low += of_warp[0];
                high += of_warp[8 * shape.sums_pitch];
            }
            use.store(unit, i, row, low, high, held);
        }
        buffer ^= 1;
    }
#endif
}

// Whether this device and these rows have it; a row that is to be normalised must fit as well.
inline bool can_ring(const device::CudaStream &stream, int64_t m, int64_t k, bool norms) {
    return has_bulk_copies(stream) && m >= 1 && m <= kRingRows && k % 8 == 0 &&
           (!norms || k <= kRingLongestNorm);
}

template <typename T, int NormVectors, typename Use>
void launch_row_ring(const device::CudaStream &stream, const FewRowsInput &in, const Use &use,
                     const RingTuning &tuning) {
    const int n_units = int((use.count() + use.items - 1) / use.items);
    const int rounds = (n_units + stream.n_processors - 1) / stream.n_processors;
    const int grid = (n_units + rounds - 1) / rounds;
    const RingShape shape = ring_shape(in, use.items, rounds, tuning);
    const auto kernel = row_ring_kernel<T, NormVectors, Use>;
    allow_shared(kernel, size_t(stream.max_shared_bytes)); // a recorded launch may have had more
    launch(stream, kernel, unsigned(grid), kRingThreads + kRingCopiers * kWarp, shape.bytes, true,
           in, use, n_units, shape);
}

template <typename T, typename Use>
void run_row_ring(const device::CudaStream &stream, const FewRowsInput &in, const Use &use,
                  const RingTuning &tuning = {}) {
    if (in.residual == nullptr) {
        launch_row_ring<T, 0>(stream, in, use, tuning);
    } else if (in.k <= 2 * 4 * kRingThreads) {
        launch_row_ring<T, 2>(stream, in, use, tuning);
    } else {
        launch_row_ring<T, 4>(stream, in, use, tuning);
    }
}

} // namespace llaisys::ops::cuda
