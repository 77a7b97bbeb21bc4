// Split-K GEMM for M up to 16 with TMA and wgmma on compute capability 9.0: out[m, n] (+)= x[m,
// k] * w[n, k]^T, 16-bit operands, f32 output. Bound: reading the weights once from DRAM, and x
// once per cluster from L2.
//
// out^T = w * x^T: weights are the 64-row operand of wgmma and the rows of x (8 or 16,
// zero-filled) its columns; both are loaded as K tiles of 64 values. A cluster of blocks owns up
// to 128 rows of w and splits k; there are as many clusters as fit on the SMs, so that each owns
// about the same number of rows. x shares the L2 to SM path with the weights;
// gemm_small_m_bulk.cuh reloads x for every 16 weight rows and is bound by that path. Two
// producer warps load weights and x; two consumer warpgroups compute 64 rows each or, with at
// most 64 rows, alternate over the K tiles. Partial sums go to the blocks of the cluster through
// DSMEM; each block reduces a share of the rows in split order.
//
// Weights are loaded before grid_dependency_wait(). The bits of an output row depend on n and k
// and, for n up to kSplitKWideN, on whether m exceeds 8.
#pragma once

#include "ops/cuda/cluster.cuh"
#include "ops/cuda/gemm_epilogue.cuh"
#include "ops/cuda/tma.cuh"
#include "ops/cuda/tma_pipeline.cuh"
#include "ops/cuda/tuning_sm90.hpp"

#include <algorithm>

namespace llaisys::ops::cuda {

constexpr int kSplitKMaxM = 16;      // largest M
constexpr int kSplitKAtom = 16;      // rows of w per warp
constexpr int kSplitKMaxAtoms = 8;   // per cluster: two 64-row tiles
constexpr int kSplitKWarpgroups = 2; // consumers
constexpr int kSplitKThreads = (kSplitKWarpgroups * 4 + 2) * kWarpSize;
constexpr int kSplitKMaxStages = 16;
constexpr uint32_t kSplitKBarrierBytes = 1024;

struct SplitKProblem {
    const void *x; // [m, k], row stride ldx
    int64_t ldx;
    const void *w; // [n, k]
    int m, n, k;
    float *out; // [m, n], row stride ldo
    int64_t ldo;
    bool adds;
};

// Tiling and shared memory layout.
struct SplitKConfig {
    int cluster, atoms; // blocks per cluster; 16-row atoms of w per cluster
    int k_tiles;        // per block
    int k_tiles_per_stage, n_stages, prefetch_stages;
    bool groups_alternate; // the warpgroups alternate over the K tiles
    // Advance of a warpgroup per K tile: K tiles, whole stages, remaining K tiles.
    int step, step_stages, step_in_stage;
    uint32_t x_at, stage_bytes, sums_at, bytes;
};

inline SplitKConfig splitk_config(const device::CudaStream &stream, int n, int k, int columns,
                                  SplitKTuning tuning) {
    const SplitKTuning usual = n > kSplitKWideN ? kSplitKWide
                               : columns <= 8   ? kSplitKNarrow
                                                : kSplitKNarrow16;
    SplitKConfig s{};
    s.cluster = tuning.cluster > 0 ? tuning.cluster : usual.cluster;
    // A cluster is placed within one GPC, which has at least 16 SMs.
    const int clusters = stream.n_sms / 16 * 16 / s.cluster;
    const int n_atoms = n / kSplitKAtom;
    s.atoms = (n_atoms + clusters - 1) / std::max(1, clusters);
    s.k_tiles = (k / kTmaTileK + s.cluster - 1) / s.cluster;
    const uint32_t weights = uint32_t(s.atoms * kSplitKAtom) * kTmaRowBytes;
    const uint32_t x = uint32_t(columns) * kTmaRowBytes;
    const size_t stage = tuning.stage_bytes > 0 ? tuning.stage_bytes : usual.stage_bytes;
    s.k_tiles_per_stage = std::clamp(int(stage / (weights + x)), 1, std::max(1, s.k_tiles / 3));
    s.x_at = uint32_t(s.k_tiles_per_stage) * weights;
    s.stage_bytes = uint32_t(s.k_tiles_per_stage) * (weights + x);
    const size_t buffer = tuning.buffer_bytes > 0 ? tuning.buffer_bytes : usual.buffer_bytes;
    const size_t early = tuning.prefetch_bytes > 0 ? tuning.prefetch_bytes : usual.prefetch_bytes;
    s.groups_alternate = s.atoms <= 4;
    s.step = s.groups_alternate ? kSplitKWarpgroups : 1;
    s.step_stages = s.step / s.k_tiles_per_stage;
    s.step_in_stage = s.step % s.k_tiles_per_stage;
    const int wanted = (s.k_tiles + s.k_tiles_per_stage - 1) / s.k_tiles_per_stage;
    // A warpgroup holds a stage until its next one is full, which may be the next but one.
    s.n_stages = std::min({std::max(3, int(buffer / s.stage_bytes)), wanted, kSplitKMaxStages});
    s.prefetch_stages = std::clamp(int(early / s.stage_bytes), 1, s.n_stages);
    // A 64-row tile may read past the weights of the last K tile; those sums are dropped.
    const uint32_t past = uint32_t((s.atoms + 3) / 4 * 4 - s.atoms) * kSplitKAtom * kTmaRowBytes;
    s.sums_at =
        (kSplitKBarrierBytes + uint32_t(s.n_stages) * s.stage_bytes + past + 127) / 128 * 128;
    const auto own = uint32_t((s.atoms + s.cluster - 1) / s.cluster);
    s.bytes = s.sums_at + uint32_t(s.cluster * s.step) * own * uint32_t(columns) * kSplitKAtom * 4;
    return s;
}

template <typename T, int Columns>
__global__ void __launch_bounds__(kSplitKThreads, 3)
    gemm_tma_splitk_kernel(const __grid_constant__ GemmMaps maps, SplitKProblem p,
                           SplitKConfig shape) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    extern __shared__ __align__(1024) unsigned char shared[];
    const uint32_t full = smem_address(shared);
    const uint32_t empty = full + kSplitKMaxStages * 8;
    const uint32_t exchange = empty + kSplitKMaxStages * 8;
    const uint32_t buffer = full + kSplitKBarrierBytes;
    const int warp = __shfl_sync(kFullMask, threadIdx.x / kWarpSize, 0); // warp-uniform
    const int lane = threadIdx.x % kWarpSize;
    const int group = warp / 4;
    const int tile = shape.groups_alternate ? 0 : group;
    const int first_own = shape.groups_alternate ? group : 0;
    const int n_groups = shape.groups_alternate ? kSplitKWarpgroups : (shape.atoms + 3) / 4;
    const int rank = int(blockIdx.x) % shape.cluster;
    const int first_atom = int(blockIdx.x) / shape.cluster * shape.atoms;
    const int n_atoms = p.n / kSplitKAtom;
    const int first_k_tile = rank * shape.k_tiles;
    const int own_k_tiles = max(0, min(shape.k_tiles, p.k / kTmaTileK - first_k_tile));
    constexpr int kAtomSums = Columns / 8 * kWarpSize; // float4 values per atom
    // reduced by this block
    const int own_atoms = (shape.atoms + shape.cluster - 1) / shape.cluster;

    launch_dependents();
    if (threadIdx.x == kSplitKWarpgroups * 128) {
        const bool is_ones = shape.groups_alternate && shape.k_tiles_per_stage == 1;
        for (int stage = 0; stage < shape.n_stages; ++stage) {
            mbarrier_init(full + uint32_t(stage) * 8, 2);
            mbarrier_init(empty + uint32_t(stage) * 8, uint32_t(is_ones ? 1 : n_groups));
        }
        mbarrier_init(exchange, 1);
        fence_mbarrier_init();
        const int ending = (shape.atoms - rank + shape.cluster - 1) / shape.cluster;
        mbarrier_arrive_expect_tx(exchange,
                                  uint32_t(shape.cluster * shape.step * ending * kAtomSums) * 16);
    }
    __syncthreads();
    barrier_cluster_arrive_relaxed();
    // K tiles of the last stage that lie beyond the split are loaded and not used.
    const TmaPipeline stages{shape.n_stages, shape.stage_bytes, full, empty};
    if (warp == kSplitKWarpgroups * 4) {
        const uint64_t policy = l2_evict_first_policy();
        produce_stages(
            stages, first_k_tile, own_k_tiles, shape.k_tiles_per_stage, buffer, shape.x_at,
            shape.prefetch_stages, [&](uint32_t to, int k_tile, uint32_t barrier) {
                tma_load_k_tiles(to, &maps.w, first_atom * kSplitKAtom, k_tile, barrier, policy);
            });
    } else if (warp == kSplitKWarpgroups * 4 + 1) {
        const uint64_t policy = l2_evict_last_policy();
        produce_stages(stages, first_k_tile, own_k_tiles, shape.k_tiles_per_stage,
                       buffer + shape.x_at, shape.stage_bytes - shape.x_at, 0,
                       [&](uint32_t to, int k_tile, uint32_t barrier) {
                           tma_load_k_tiles(to, &maps.x, 0, k_tile, barrier, policy);
                       });
    }
    grid_dependency_wait();
    if (group < n_groups) {
        // bytes of one K tile
        const uint32_t weights = uint32_t(shape.atoms * kSplitKAtom) * kTmaRowBytes;
        float sums[Columns / 2] = {};
        // Warp-uniform and branch-free: stage bookkeeping stays in uniform registers. A nested
        // loop makes the compiler serialize consecutive wgmma groups.
        int stage = first_own >= shape.k_tiles_per_stage ? first_own : 0;
        int in_stage = first_own >= shape.k_tiles_per_stage ? 0 : first_own;
        int previous = -1; // stage read by the wgmma group in flight
        uint32_t parity = 0;
        for (int k_tile = first_own; k_tile < own_k_tiles; k_tile += shape.step) {
            mbarrier_wait_parity(full + uint32_t(stage) * 8, parity);
            const uint32_t at = buffer + uint32_t(stage) * shape.stage_bytes;
            mma_k_tile<T>(sums,
                          at + uint32_t(in_stage) * weights +
                              uint32_t(tile * 4 * kSplitKAtom) * kTmaRowBytes,
                          at + shape.x_at + uint32_t(in_stage * Columns) * kTmaRowBytes);
            if (previous >= 0 && threadIdx.x % 128 == 0) {
                mbarrier_arrive(empty + uint32_t(previous) * 8);
            }
            const int current = stage;
            in_stage += shape.step_in_stage;
            const bool is_read = in_stage >= shape.k_tiles_per_stage;
            in_stage -= is_read ? shape.k_tiles_per_stage : 0;
            stage += shape.step_stages + (is_read ? 1 : 0);
            previous = stage > current ? current : -1;
            const bool is_last = stage >= shape.n_stages;
            stage -= is_last ? shape.n_stages : 0;
            parity ^= is_last ? 1 : 0;
        }
        wgmma_wait_group<0>();
        fence_operands(sums);
        barrier_cluster_wait(); // peers have initialized their mbarriers
        const int own = tile * 4 + warp % 4;
        if (own < shape.atoms) {
            const int part = rank * shape.step + first_own;
            const int slot = part * own_atoms + own / shape.cluster;
            const auto to_block = uint32_t(own % shape.cluster);
            const uint32_t to =
                mapa(full + shape.sums_at + uint32_t(slot * kAtomSums + lane) * 16, to_block);
            const uint32_t barrier = mapa(exchange, to_block);
#pragma unroll
            for (int j = 0; j < Columns / 8; ++j) {
                st_async(
                    to + uint32_t(j * kWarpSize) * 16,
                    make_float4(sums[4 * j], sums[4 * j + 1], sums[4 * j + 2], sums[4 * j + 3]),
                    barrier);
            }
        }
    } else {
        barrier_cluster_wait();
    }
    // Atom rank + cluster * a: rows lane / 4 and 8 below, columns 8 j + lane % 4 * 2 and the
    // next.
    const auto at = [&](int a, int j) {
        const int own = a * shape.cluster + rank;
        const bool is_one = own < shape.atoms && first_atom + own < n_atoms;
        return is_one ? p.out + (8 * j + lane % 4 * 2) * p.ldo +
                            int64_t(first_atom + own) * kSplitKAtom + lane / 4
                      : nullptr;
    };
    const auto has = [&](int j, int column) { return 8 * j + lane % 4 * 2 + column < p.m; };
    constexpr int kFragments = Columns / 8;
    // current output of the first fragment; the load overlaps with the arrival of the partial
    // sums
    float4 previous = {};
    const auto load = [&](const float *from, int j) {
        if (p.adds && from != nullptr) {
            previous.x = has(j, 0) ? from[0] : 0.0f;
            previous.z = has(j, 0) ? from[8] : 0.0f;
            previous.y = has(j, 1) ? from[p.ldo] : 0.0f;
            previous.w = has(j, 1) ? from[p.ldo + 8] : 0.0f;
        }
    };
    load(at(warp / kFragments, warp % kFragments), warp % kFragments);
    mbarrier_wait_parity_cluster(exchange, 0); // all peers have stored their partial sums
    const auto *all = reinterpret_cast<const float4 *>(shared + shape.sums_at);
    for (int i = warp; i < own_atoms * kFragments; i += kSplitKThreads / kWarpSize) {
        const int a = i / kFragments;
        const int j = i % kFragments;
        float *to = at(a, j);
        if (i > warp) {
            load(to, j);
        }
        float4 total = all[a * kAtomSums + j * kWarpSize + lane];
        for (int part = 1; part < shape.cluster * shape.step; ++part) {
            const float4 more = all[(part * own_atoms + a) * kAtomSums + j * kWarpSize + lane];
            total =
                make_float4(total.x + more.x, total.y + more.y, total.z + more.z, total.w + more.w);
        }
        if (to != nullptr && has(j, 0)) {
            to[0] = previous.x + total.x;
            to[8] = previous.z + total.z;
        }
        if (to != nullptr && has(j, 1)) {
            to[p.ldo] = previous.y + total.y;
            to[p.ldo + 8] = previous.w + total.w;
        }
    }
#endif
}

// Whether the kernel supports this device and shape.
inline bool can_gemm_tma_splitk(const device::CudaStream &stream, const SplitKProblem &p) {
    return has_wgmma(stream) && encode_tensor_map() != nullptr && p.m >= 1 && p.m <= kSplitKMaxM &&
           p.n % kSplitKAtom == 0 && p.k % kTmaTileK == 0 && stream.n_sms >= 16 &&
           splitk_config(stream, p.n, p.k, kSplitKMaxM, {}).atoms <= kSplitKMaxAtoms;
}

// Whether it is the fastest choice.
inline bool prefers_gemm_tma_splitk(const device::CudaStream &stream, const SplitKProblem &p) {
    return !stream.is_exact && (p.m > 1 || int64_t(p.n) * p.k <= kSplitKMaxGemvWeights) &&
           can_gemm_tma_splitk(stream, p);
}

template <typename T, int Columns>
void launch_gemm_tma_splitk(const device::CudaStream &stream, const SplitKProblem &p,
                            const SplitKTuning &tuning) {
    const SplitKConfig shape = splitk_config(stream, p.n, p.k, Columns, tuning);
    const auto map_of = [&](const void *data, int64_t n, int64_t step, int tile_rows) {
        return make_tensor_map<T, 3>(static_cast<const T *>(data), {kTmaTileK, n, p.k / kTmaTileK},
                                     {step, kTmaTileK},
                                     {uint32_t(tile_rows), uint32_t(shape.k_tiles_per_stage)});
    };
    const GemmMaps maps{map_of(p.w, p.n, p.k, shape.atoms * kSplitKAtom),
                        map_of(p.x, p.m, p.ldx, Columns)};
    const int clusters = (p.n / kSplitKAtom + shape.atoms - 1) / shape.atoms;
    const auto kernel = gemm_tma_splitk_kernel<T, Columns>;
    set_max_dynamic_smem(kernel, size_t(stream.max_shared_bytes));
    launch(stream, kernel, unsigned(clusters * shape.cluster), kSplitKThreads, shape.bytes,
           {true, unsigned(shape.cluster)}, maps, p, shape);
}

template <typename T>
void run_gemm_tma_splitk(const device::CudaStream &stream, const SplitKProblem &p,
                         const SplitKTuning &tuning = {}) {
    if (p.m <= 8) {
        launch_gemm_tma_splitk<T, 8>(stream, p, tuning);
    } else {
        launch_gemm_tma_splitk<T, 16>(stream, p, tuning);
    }
}

} // namespace llaisys::ops::cuda
