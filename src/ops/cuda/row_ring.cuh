// Products with 1 to 16 rows of x (few_rows_types.cuh) on compute capability 9: bound by reading the
// weights once.
//
// One block a processor, 8 warps that compute and two that copy. A slot of the ring holds 512 values
// of every weight row of a unit, one bulk copy each (1 KB, given up by the second-level cache first),
// and the same 512 of the rows of x where these have 16 bits; a barrier says when a slot is full,
// another when its readers are done. A warp issues its copies one after the other, so one alone would
// be the limit (74 % of the bandwidth); the two take turns at the slots. Four are slower again. Rows are
// 1,088 bytes apart, so that the 8 lanes of a 16-byte read meet different banks. A warp takes 64 of the
// 512 values; k is dealt to the operands in an order of its own, the same for both (a lane's 16 bytes).
// Sums: two chains a warp, then the warps in order, in shared memory. f32 rows are normalised into
// shared memory by each block for itself (row_ring_norm.cuh).
//
// Weights are on their way before the kernel waits for its input, but only `early_bytes` of them: the
// kernel before has copies of its own under way, and how many are best is measured (row_ring_shape.cuh).
// A row's bits depend on k alone, neither on how many rows nor on how many outputs there are.
#pragma once

#include "ops/cuda/row_ring_norm.cuh"

namespace llaisys::ops::cuda {

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

// WarpsARow: that normalise a row; 0: x has 16 bits.
template <typename T, int WarpsARow, typename Use>
__global__ void __launch_bounds__(kRingThreads + kRingCopiers * kWarp, 2)
    row_ring_kernel(FewRowsInput in, Use use, int n_units, RingShape shape) {
#if __CUDA_ARCH__ >= 900
    constexpr bool kStreams = WarpsARow == 0;
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
    if constexpr (!kStreams) {
        prefetch_norm_weight(in);
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
        norm_rows_inside<T, WarpsARow>(shared + shape.x_at, shape.x_stride, in,
                                       reinterpret_cast<float *>(shared + shape.scratch_at));
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
            held = hold(use, unit, threadIdx.x % 8, threadIdx.x / 8);
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
            use.store(unit, i, row, low, high, use.ready(unit, i, held));
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

template <typename T, int WarpsARow, typename Use>
void launch_row_ring(const device::CudaStream &stream, const FewRowsInput &in, const Use &use,
                     const RingTuning &tuning) {
    const int n_units = int((use.count() + use.items - 1) / use.items);
    const int rounds = (n_units + stream.n_processors - 1) / stream.n_processors;
    const int grid = (n_units + rounds - 1) / rounds;
    const RingShape shape =
        ring_shape(in, use.items, rounds, size_t(stream.max_shared_bytes) / 2 + 1024, tuning);
    const auto kernel = row_ring_kernel<T, WarpsARow, Use>;
    allow_shared(kernel, size_t(stream.max_shared_bytes)); // a recorded launch may have had more
    launch(stream, kernel, unsigned(grid), kRingThreads + kRingCopiers * kWarp, shape.bytes, true,
           in, use, n_units, shape);
}

template <typename T, typename Use>
void run_row_ring(const device::CudaStream &stream, const FewRowsInput &in, const Use &use,
                  const RingTuning &tuning = {}) {
    if (in.residual == nullptr) {
        launch_row_ring<T, 0>(stream, in, use, tuning);
    } else if (in.k <= kRingNormK) {
        launch_row_ring<T, 1>(stream, in, use, tuning);
    } else {
        launch_row_ring<T, 2>(stream, in, use, tuning);
    }
}

} // namespace llaisys::ops::cuda
