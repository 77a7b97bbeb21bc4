// out[m, n] = up * gate / (1 + exp(-gate)), gate = x * w_gate^T, up = x * w_up^T: many rows, 16-bit values,
// compute capability 9.0 (wgmma). Neither gate nor up is ever in memory.
//
// A tile is 256 rows and 96 outputs, that is 192 weight rows: 96 of gate, then the same 96 of up, so that a
// thread's sums hold both halves of an output. Two warpgroups multiply 128 rows each (two m64n192k16), 192 sums a
// thread; one thread copies. A slot of the ring is 64 values of k: 32 KB of x and 24 KB of weights, four slots. Two
// blocks, a cluster, have tiles below each other: each copies one half of the weights into both, and its own rows of
// x. Clusters stay and go through the tiles in an order in which the rows of x that they share stay in the
// second-level cache while weights go by.
//
// Bound by the tensor cores, and hardly less by what a processor takes in over the second-level cache (about 65 KB
// a us): hence the large tile, 219 operations for each byte that comes in, and no room for results, which go out
// of the registers.
#pragma once

#include "ops/cuda/cluster.cuh"
#include "ops/cuda/tensor_map.cuh"
#include "ops/cuda/wgmma.cuh"

#include <algorithm>

namespace llaisys::ops::cuda {

constexpr int kGatedCluster = 2; // tiles below each other
constexpr int kGatedRows = 256;  // of a tile
constexpr int kGatedOutputs = 96;
constexpr int kGatedSlots = 4;
constexpr int kGatedGroup = 128; // threads of a warpgroup
constexpr int kGatedThreads = 3 * kGatedGroup;
constexpr int kGatedTogether = 4096; // rows that are gone through before the next ones
constexpr int kGatedHalves = 2;      // of 64 rows, a warpgroup
constexpr uint32_t kGatedXBytes = kGatedRows * kBoxRowBytes;
constexpr uint32_t kGatedPartBytes = kGatedOutputs * kBoxRowBytes; // gate or up
constexpr uint32_t kGatedSlotBytes = kGatedXBytes + 2 * kGatedPartBytes;
constexpr int kGatedShared = 1024 + int(kGatedSlots * kGatedSlotBytes) + 2 * kGatedSlots * 8;

// What a launch goes through: pairs of tiles, some of them down before the next ones across.
struct GatedTiles {
    int m, n, k;
    int64_t ldo;
    int down, across, together;

    __host__ __device__ int count() const { return down * across; }
    // First row and first output of pair t.
    __device__ __forceinline__ void place(int t, int *row, int *output) const {
        const int band = t / (together * across);
        const int inside = t - band * together * across;
        const int height = min(together, down - band * together);
        *row = (band * together + inside % height) * kGatedCluster * kGatedRows;
        *output = inside / height * kGatedOutputs;
    }
};

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

// gate / (1 + exp(-gate)) of two, with one division; where the exponential is cut off the result is nothing.
__device__ __forceinline__ float2 silu_pair(float a, float b) {
    constexpr float kLog2e = 1.4426950408889634f;
    const float under_a = 1.0f + exp2_fast(fminf(-kLog2e * a, 60.0f));
    const float under_b = 1.0f + exp2_fast(fminf(-kLog2e * b, 60.0f));
    const float inverse = __fdividef(1.0f, under_a * under_b);
    return make_float2(a * (under_b * inverse), b * (under_a * inverse));
}

// v[j] of lane k of a quad becomes v[k] of lane j.
__device__ __forceinline__ void turn_quad(uint32_t (&v)[4]) {
    const bool is_odd = (threadIdx.x & 1) != 0, is_high = (threadIdx.x & 2) != 0;
    const auto exchange = [](uint32_t &low, uint32_t &high, bool gives_low, int lane) {
        const uint32_t got = __shfl_xor_sync(0xffffffffu, gives_low ? low : high, lane);
        (gives_low ? low : high) = got;
    };
    exchange(v[0], v[1], is_odd, 1);
    exchange(v[2], v[3], is_odd, 1);
    exchange(v[0], v[2], is_high, 2);
    exchange(v[1], v[3], is_high, 2);
}

// 64 rows of a warpgroup from `row` on: a lane writes eight neighbouring outputs at a time.
template <typename T>
__device__ __forceinline__ void store_gated(const float (&sums)[kGatedOutputs], T *out,
                                            const GatedTiles &tiles, int row, int output) {
    const int lane = threadIdx.x % kWarp;
    const int warp = threadIdx.x / kWarp % 4;
    const float *up = sums + kGatedOutputs / 2;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const int to_row = row + warp * 16 + half * 8 + lane / 4;
#pragma unroll
        for (int i = 0; i < kGatedOutputs / 32; ++i) {
            uint32_t pairs[4];
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                const int at = 16 * i + 4 * j + 2 * half;
                const float2 gate = silu_pair(sums[at], sums[at + 1]);
                pairs[j] = pack_pair<T>(gate.x * up[at], gate.y * up[at + 1]);
            }
            turn_quad(pairs);
            const int column = output + (4 * i + lane % 4) * 8;
            if (to_row < tiles.m && column < tiles.n) {
                *reinterpret_cast<uint4 *>(out + to_row * tiles.ldo + column) =
                    make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
            }
        }
    }
}
#endif

template <typename T>
__global__ void __launch_bounds__(kGatedThreads, 1)
    gated_product_kernel(const __grid_constant__ CUtensorMap x,
                         const __grid_constant__ CUtensorMap gate,
                         const __grid_constant__ CUtensorMap up, GatedTiles tiles, T *out) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    extern __shared__ __align__(1024) unsigned char dynamic[];
    const uint32_t ring = (shared_address(dynamic) + 1023u) & ~1023u;
    const uint32_t full = ring + kGatedSlots * kGatedSlotBytes;
    const uint32_t empty = full + kGatedSlots * 8;
    // The same for all lanes, and said so: what products are told lies in uniform registers.
    const int group = __shfl_sync(0xffffffffu, int(threadIdx.x) / kGatedGroup, 0);
    const uint32_t rank = rank_in_cluster();
    const int first = int(blockIdx.x) / kGatedCluster;
    const int step = int(gridDim.x) / kGatedCluster;
    const int chunks = (tiles.k + kBoxColumns - 1) / kBoxColumns;

    allow_next();
    if (threadIdx.x == 0) {
        for (int i = 0; i < kGatedSlots; ++i) {
            barrier_init(full + i * 8, 1);
            barrier_init(empty + i * 8, kGatedCluster * 2); // both blocks' warpgroups
        }
        barriers_are_made();
    }
    cluster_arrive();
    cluster_wait();
    wait_for_input();
    int slot = 0;
    uint32_t parity = 0;
    const auto next = [&] {
        if (++slot == kGatedSlots) {
            slot = 0;
            parity ^= 1;
        }
    };
    if (group == 2) {
        give_registers<40>();
        if (threadIdx.x == 2 * kGatedGroup) {
            bool is_first_round = true;
            for (int t = first; t < tiles.count(); t += step) {
                int row, output;
                tiles.place(t, &row, &output);
                row += int(rank) * kGatedRows;
                for (int chunk = 0; chunk < chunks; ++chunk) {
                    if (!is_first_round) {
                        barrier_wait_cluster(empty + slot * 8, parity ^ 1);
                    }
                    const uint32_t to = ring + slot * kGatedSlotBytes;
                    const uint32_t barrier = full + slot * 8;
                    const int k = chunk * kBoxColumns;
                    barrier_arrive_expecting(barrier, kGatedSlotBytes);
                    copy_box(to, &x, k, row, barrier);
                    copy_box_to(3, to + kGatedXBytes + rank * kGatedPartBytes,
                                rank == 0 ? &gate : &up, k, output, barrier);
                    next();
                    is_first_round = is_first_round && slot != 0;
                }
            }
        }
        __syncwarp();
    } else {
        take_registers<232>();
        const uint32_t thread = threadIdx.x % kGatedGroup;
        const uint32_t empty_there = address_in_block(empty, thread % kGatedCluster);
        const auto release = [&](int which) { // both blocks copy into it
            if (thread < kGatedCluster) {
                arrive_in_block(empty_there + which * 8);
            }
        };
        constexpr uint32_t kHalfBytes = 64 * kBoxRowBytes;
        const uint64_t of_x = descriptor_along(ring + group * kGatedHalves * kHalfBytes);
        const uint64_t of_w = descriptor_along(ring + kGatedXBytes);
        for (int t = first; t < tiles.count(); t += step) {
            float sums[kGatedHalves][kGatedOutputs];
            int before = 0;
            for (int chunk = 0; chunk < chunks; ++chunk) {
                barrier_wait(full + slot * 8, parity);
                const uint64_t at = uint64_t(slot) * (kGatedSlotBytes >> 4);
                products_begin();
#pragma unroll
                for (int k = 0; k < 4; ++k) { // 32 bytes further each
#pragma unroll
                    for (int half = 0; half < kGatedHalves; ++half) {
                        Wgmma<T>::along(sums[half],
                                        of_x + at + uint64_t(k * 2 + half * (kHalfBytes >> 4)),
                                        of_w + at + uint64_t(k * 2), chunk > 0 || k > 0);
                    }
                }
                products_end_group();
                if (chunk > 0) { // the products before these are done
                    products_wait<1>();
                    release(before);
                }
                before = slot;
                next();
            }
            products_wait<0>();
            release(before);
            int row, output;
            tiles.place(t, &row, &output);
            row += int(rank) * kGatedRows + group * kGatedHalves * 64;
#pragma unroll
            for (int half = 0; half < kGatedHalves; ++half) {
                settle(sums[half]);
                store_gated<T>(sums[half], out, tiles, row + half * 64, output);
            }
        }
    }
    cluster_arrive(); // nobody leaves while the other copies into its memory
    cluster_wait();
#endif
}

// Whether this build and device have it.
inline bool has_gated_product(const device::CudaStream &stream) {
    return has_wgmma(stream) && stream.max_shared_bytes >= kGatedShared &&
           encode_tensor_map() != nullptr;
}

inline GatedTiles gated_tiles(int64_t m, int64_t n, int64_t k, int64_t ldo) {
    constexpr int64_t kPairRows = kGatedCluster * kGatedRows;
    GatedTiles tiles{};
    tiles.m = int(m);
    tiles.n = int(n);
    tiles.k = int(k);
    tiles.ldo = ldo;
    tiles.down = int((m + kPairRows - 1) / kPairRows);
    tiles.across = int((n + kGatedOutputs - 1) / kGatedOutputs);
    tiles.together = std::min(tiles.down, int(kGatedTogether / kPairRows));
    return tiles;
}

// Whether m rows and n outputs fill the tiles, and these the rounds of the processors, by seven tenths: below,
// cuBLASLt with swiglu behind it is as fast.
inline bool fills_gated_tiles(const device::CudaStream &stream, int64_t m, int64_t n) {
    const int64_t clusters = stream.n_processors / kGatedCluster;
    const int64_t rounds = (gated_tiles(m, n, 0, 0).count() + clusters - 1) / clusters;
    return 10 * m * n >= 7 * rounds * clusters * kGatedCluster * kGatedRows * kGatedOutputs;
}

// x [m, k], weights [n, k], out [m, n]; k, n and the strides are multiples of 8, all lies on 16 bytes.
template <typename T>
void run_gated_product(const device::CudaStream &stream, T *out, int64_t ldo, const T *x,
                       int64_t ldx, const T *gate, const T *up, int64_t m, int64_t n, int64_t k) {
    const GatedTiles tiles = gated_tiles(m, n, k, ldo);
    const auto kernel = gated_product_kernel<T>;
    allow_shared(kernel, size_t(kGatedShared));
    const int clusters = std::min(stream.n_processors / kGatedCluster, tiles.count());
    launch(stream, kernel, unsigned(clusters * kGatedCluster), kGatedThreads, size_t(kGatedShared),
           {true, unsigned(kGatedCluster)}, boxes_of<T, 2>(x, {k, m}, {ldx}, {kGatedRows}),
           boxes_of<T, 2>(gate, {k, n}, {k}, {kGatedOutputs}),
           boxes_of<T, 2>(up, {k, n}, {k}, {kGatedOutputs}), tiles, out);
}

} // namespace llaisys::ops::cuda
