// GEMM with fused SwiGLU for prefill on compute capability 9.0 (TMA + wgmma): out[m, n] = up *
// gate / (1 + exp(-gate)), gate = x * w_gate^T, up = x * w_up^T. 16-bit values; gate and up are
// not written to memory.
//
// Tile: 256 rows by 96 outputs, that is 192 weight rows (96 of gate, the same 96 of up), so that
// a thread holds both accumulators of an output. Two consumer warpgroups compute 128 rows each
// (two m64n192k16, 192 accumulators per thread); one thread is the TMA producer. A pipeline stage
// is 64 values of k: 32 KB of x and 24 KB of weights, four stages. A cluster of two blocks covers
// two tiles along M: each block multicasts one half of the weights to both and loads its own rows
// of x. Clusters are persistent; tiles are rasterized in bands so that the rows of x stay in L2
// while weights stream.
//
// Bound: tensor cores, closely followed by L2 to SM bandwidth (about 65 KB per us and SM). Hence
// the large tile (219 FLOP per loaded byte) and no shared memory staging of the output.
#pragma once

#include "ops/cuda/cluster.cuh"
#include "ops/cuda/swiglu_rows.cuh"
#include "ops/cuda/tma_pipeline.cuh"

#include <algorithm>

namespace llaisys::ops::cuda {

constexpr int kSwigluCluster = 2; // tiles along M
constexpr int kSwigluTileM = 256; // rows of a tile
constexpr int kSwigluTileN = 96;
constexpr int kSwigluStages = 4;
constexpr int kSwigluGroup = 128; // threads of a warpgroup
constexpr int kSwigluGemmThreads = 3 * kSwigluGroup;
constexpr int kSwigluBandRows = 4096; // rows of x per rasterization band
constexpr int kSwigluHalves = 2;      // 64-row halves per warpgroup
constexpr uint32_t kSwigluXBytes = kSwigluTileM * kTmaRowBytes;
constexpr uint32_t kSwigluWeightBytes = kSwigluTileN * kTmaRowBytes; // gate or up
constexpr uint32_t kSwigluStageBytes = kSwigluXBytes + 2 * kSwigluWeightBytes;
constexpr int kSwigluSmem = 1024 + int(kSwigluStages * kSwigluStageBytes) + 2 * kSwigluStages * 8;

// Work of a launch: pairs of tiles, rasterized along M within a band, then along N.
struct SwigluTiles {
    int m, n, k;
    int64_t ldo;
    int tiles_m, tiles_n, band_tiles;

    __host__ __device__ int count() const { return tiles_m * tiles_n; }
    // First row and first output of pair t.
    __device__ __forceinline__ void origin(int t, int *row, int *output) const {
        const int band = t / (band_tiles * tiles_n);
        const int inside = t - band * band_tiles * tiles_n;
        const int height = min(band_tiles, tiles_m - band * band_tiles);
        *row = (band * band_tiles + inside % height) * kSwigluCluster * kSwigluTileM;
        *output = inside / height * kSwigluTileN;
    }
};

template <typename T>
__global__ void __launch_bounds__(kSwigluGemmThreads, 1)
    gemm_swiglu_sm90_kernel(const __grid_constant__ CUtensorMap x,
                            const __grid_constant__ CUtensorMap gate,
                            const __grid_constant__ CUtensorMap up, SwigluTiles tiles, T *out) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    extern __shared__ __align__(1024) unsigned char dynamic[];
    const uint32_t buffer = (smem_address(dynamic) + 1023u) & ~1023u;
    const uint32_t full = buffer + kSwigluStages * kSwigluStageBytes;
    const uint32_t empty = full + kSwigluStages * 8;
    // Warp-uniform value: wgmma descriptors then stay in uniform registers.
    const int group = __shfl_sync(0xffffffffu, int(threadIdx.x) / kSwigluGroup, 0);
    const uint32_t rank = cluster_ctarank();
    const int first = int(blockIdx.x) / kSwigluCluster;
    const int step = int(gridDim.x) / kSwigluCluster;
    const int k_tiles = (tiles.k + kTmaTileK - 1) / kTmaTileK;

    launch_dependents();
    if (threadIdx.x == 0) {
        // arrivals of the consumer warpgroups of both blocks
        init_stages(full, empty, kSwigluStages, 1, kSwigluCluster * 2);
        fence_mbarrier_init();
    }
    barrier_cluster_arrive();
    barrier_cluster_wait();
    grid_dependency_wait();
    PipelineStage<kSwigluStages> stage;
    if (group == 2) {
        setmaxnreg_dec<40>();
        if (threadIdx.x == 2 * kSwigluGroup) {
            bool is_first_round = true;
            for (int t = first; t < tiles.count(); t += step) {
                int row, output;
                tiles.origin(t, &row, &output);
                row += int(rank) * kSwigluTileM;
                for (int k_tile = 0; k_tile < k_tiles; ++k_tile) {
                    if (!is_first_round) {
                        mbarrier_wait_parity_cluster(empty + stage.index * 8, stage.parity ^ 1);
                    }
                    const uint32_t to = buffer + stage.index * kSwigluStageBytes;
                    const uint32_t barrier = full + stage.index * 8;
                    const int k = k_tile * kTmaTileK;
                    mbarrier_arrive_expect_tx(barrier, kSwigluStageBytes);
                    tma_load(to, &x, k, row, barrier);
                    tma_load_multicast(3, to + kSwigluXBytes + rank * kSwigluWeightBytes,
                                       rank == 0 ? &gate : &up, k, output, barrier);
                    stage.next();
                    is_first_round = is_first_round && stage.index != 0;
                }
            }
        }
        __syncwarp();
    } else {
        setmaxnreg_inc<232>();
        const uint32_t thread = threadIdx.x % kSwigluGroup;
        const uint32_t empty_there = mapa(empty, thread % kSwigluCluster);
        const auto release = [&](int which) { // both blocks load into the stage
            if (thread < kSwigluCluster) {
                mbarrier_arrive_remote(empty_there + which * 8);
            }
        };
        constexpr uint32_t kHalfBytes = 64 * kTmaRowBytes;
        const uint64_t of_x = k_major_descriptor(buffer + group * kSwigluHalves * kHalfBytes);
        const uint64_t of_w = k_major_descriptor(buffer + kSwigluXBytes);
        for (int t = first; t < tiles.count(); t += step) {
            float sums[kSwigluHalves][kSwigluTileN];
            mma_k_tiles<T, kSwigluStageBytes>(sums, k_tiles, of_x, of_w, full, stage, release);
            int row, output;
            tiles.origin(t, &row, &output);
            row += int(rank) * kSwigluTileM + group * kSwigluHalves * 64;
#pragma unroll
            for (int half = 0; half < kSwigluHalves; ++half) {
                fence_operands(sums[half]);
                store_swiglu<T, kSwigluTileN / 8, 4, kSwigluTileN / 2>(
                    sums[half], out, tiles.ldo, tiles.m, tiles.n,
                    row + half * 64 + int(thread) / kWarpSize * 16, output);
            }
        }
    }
    barrier_cluster_arrive(); // no block exits while its peer multicasts into its shared memory
    barrier_cluster_wait();
#endif
}

inline SwigluTiles swiglu_tiles(int64_t m, int64_t n, int64_t k, int64_t ldo) {
    constexpr int64_t kPairRows = kSwigluCluster * kSwigluTileM;
    SwigluTiles tiles{};
    tiles.m = int(m);
    tiles.n = int(n);
    tiles.k = int(k);
    tiles.ldo = ldo;
    tiles.tiles_m = int((m + kPairRows - 1) / kPairRows);
    tiles.tiles_n = int((n + kSwigluTileN - 1) / kSwigluTileN);
    tiles.band_tiles = std::min(tiles.tiles_m, int(kSwigluBandRows / kPairRows));
    return tiles;
}

// Whether the kernel supports this build, device and product, and m rows and n outputs use at least
// 70 % of the tiles and waves. Below that, cuBLASLt followed by swiglu_rows is as fast.
template <typename T>
bool prefers_gemm_swiglu_sm90(const device::CudaStream &stream, const SwigluGemm<T> &p) {
    const int64_t clusters = stream.n_sms / kSwigluCluster;
    const int64_t rounds = (swiglu_tiles(p.m, p.n, 0, 0).count() + clusters - 1) / clusters;
    return has_wgmma(stream) && stream.max_shared_bytes >= kSwigluSmem &&
           encode_tensor_map() != nullptr && p.is_aligned() &&
           10 * int64_t(p.m) * p.n >=
               7 * rounds * clusters * kSwigluCluster * kSwigluTileM * kSwigluTileN;
}

template <typename T>
void run_gemm_swiglu_sm90(const device::CudaStream &stream, const SwigluGemm<T> &p) {
    const SwigluTiles tiles = swiglu_tiles(p.m, p.n, p.k, p.ldo);
    const auto kernel = gemm_swiglu_sm90_kernel<T>;
    set_max_dynamic_smem(kernel, size_t(kSwigluSmem));
    const int clusters = std::min(stream.n_sms / kSwigluCluster, tiles.count());
    launch(stream, kernel, unsigned(clusters * kSwigluCluster), kSwigluGemmThreads,
           size_t(kSwigluSmem), {true, unsigned(kSwigluCluster)},
           make_tensor_map<T, 2>(p.x, {p.k, p.m}, {p.ldx}, {kSwigluTileM}),
           make_tensor_map<T, 2>(p.gate, {p.k, p.n}, {p.k}, {kSwigluTileN}),
           make_tensor_map<T, 2>(p.up, {p.k, p.n}, {p.k}, {kSwigluTileN}), tiles, p.out);
}

} // namespace llaisys::ops::cuda
