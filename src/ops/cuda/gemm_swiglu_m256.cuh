// GEMM with fused SwiGLU for M up to 256 on compute capability 9.0 (TMA + wgmma): out[m, n] = up *
// gate / (1 + exp(-gate)), gate = x * w_gate^T, up = x * w_up^T. 16-bit values; gate and up are not
// written to memory. gemm_swiglu_sm90.cuh is for prompts.
//
// A tile is all rows of x (128 or 256, zero-filled) by 5 to 12 units of 8 outputs, that is 16 weight
// rows each: 8 of gate and the same 8 of up, so that a thread holds both accumulators of an output.
// The rows of x are the 64-row operand of wgmma, the weights its columns. Two consumer warpgroups
// compute half of the rows each; one thread is the TMA producer. A pipeline stage is 64 values of k.
// A cluster of two blocks takes two adjacent tiles at a time: each block loads its own weights, and
// multicasts half of the rows of x to both. Weights are loaded before grid_dependency_wait().
//
// Bound: tensor cores, closely followed by L2 to SM bandwidth.
#pragma once

#include "ops/cuda/cluster.cuh"
#include "ops/cuda/dispatch.cuh"
#include "ops/cuda/gemm_swiglu_m256_config.cuh"
#include "ops/cuda/swiglu_rows.cuh"
#include "ops/cuda/tma_pipeline.cuh"

namespace llaisys::ops::cuda {

// maps.w: [k, 8, gate and up, n / 8].
template <typename T, int Halves, int Units>
__global__ void __launch_bounds__(kSwigluM256Threads, 1)
    gemm_swiglu_m256_kernel(const __grid_constant__ GemmMaps maps, SwigluGemm<T> p) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    constexpr uint32_t kXBytes = Halves * 128 * kTmaRowBytes;
    constexpr uint32_t kHalfBytes = 64 * kTmaRowBytes;
    constexpr uint32_t kStageBytes = swiglu_m256_stage_bytes(Halves, Units);
    constexpr int kStages = swiglu_m256_stages(Halves, Units);
    extern __shared__ __align__(1024) unsigned char dynamic[];
    const uint32_t buffer = (smem_address(dynamic) + 1023u) & ~1023u;
    const uint32_t full = buffer + kStages * kStageBytes;
    const uint32_t empty = full + kStages * 8;
    // Warp-uniform: wgmma descriptors then stay in uniform registers.
    const int warp = __shfl_sync(kFullMask, int(threadIdx.x) / kWarpSize, 0);
    const int group = warp / 4;
    const int rank = int(cluster_ctarank());
    const int k_tiles = (p.k + kTmaTileK - 1) / kTmaTileK;
    const int tiles = (p.n + 16 * Units - 1) / (16 * Units) * 2; // pairs

    launch_dependents();
    if (threadIdx.x == 0) {
        init_stages(full, empty, kStages, 1, 4); // consumer warpgroups of both blocks
        fence_mbarrier_init();
    }
    __syncthreads();
    barrier_cluster_arrive_relaxed();
    barrier_cluster_wait();
    PipelineStage<kStages> stage;
    if (group == 2) {
        setmaxnreg_dec<40>();
        if (threadIdx.x == 2 * 128) {
            const uint64_t policy = l2_evict_first_policy();
            const auto load_w = [&](int tile, int k_tile, int to) {
                tma_load(buffer + uint32_t(to) * kStageBytes + kXBytes, &maps.w, k_tile * kTmaTileK,
                         0, 0, tile * Units, 0, full + to * 8, policy);
            };
            const auto load_x = [&](int k_tile, int to) {
                tma_load_multicast(
                    3, buffer + uint32_t(to) * kStageBytes + uint32_t(rank) * (kXBytes / 2),
                    &maps.x, k_tile * kTmaTileK, rank * Halves * 64, full + to * 8);
            };
            const int n_early = min(kStages, k_tiles);
            for (int i = 0; i < n_early; ++i) {
                mbarrier_arrive_expect_tx(full + i * 8, kStageBytes);
                load_w(int(blockIdx.x), i, i);
            }
            grid_dependency_wait();
            for (int i = 0; i < n_early; ++i) {
                load_x(i, i);
            }
            int issued = 0;
            for (int tile = int(blockIdx.x); tile < tiles; tile += int(gridDim.x)) {
                for (int k_tile = 0; k_tile < k_tiles; ++k_tile, stage.next()) {
                    if (issued++ < n_early) {
                        continue;
                    }
                    if (issued > kStages) {
                        mbarrier_wait_parity_cluster(empty + stage.index * 8, stage.parity ^ 1);
                    }
                    mbarrier_arrive_expect_tx(full + stage.index * 8, kStageBytes);
                    load_w(tile, k_tile, stage.index);
                    load_x(k_tile, stage.index);
                }
            }
        }
        __syncwarp();
    } else {
        setmaxnreg_inc<232>();
        grid_dependency_wait(); // earlier kernels may read the output
        const uint32_t thread = threadIdx.x % 128;
        const auto release = [&](int which) { // both blocks load into the stage
            if (thread < 2) {
                mbarrier_arrive_remote(mapa(empty + which * 8, thread));
            }
        };
        const uint64_t of_x = k_major_descriptor(buffer + group * Halves * kHalfBytes);
        const uint64_t of_w = k_major_descriptor(buffer + kXBytes);
        for (int tile = int(blockIdx.x); tile < tiles; tile += int(gridDim.x)) {
            float sums[Halves][8 * Units];
            mma_k_tiles<T, kStageBytes>(sums, k_tiles, of_x, of_w, full, stage, release);
#pragma unroll
            for (int half = 0; half < Halves; ++half) {
                fence_operands(sums[half]);
                store_swiglu<T, Units, 8, 4>(sums[half], p.out, p.ldo, p.m, p.n,
                                             ((group * Halves + half) * 4 + warp % 4) * 16,
                                             tile * Units * 8);
            }
        }
    }
    barrier_cluster_arrive(); // no block exits while its peer multicasts into its shared memory
    barrier_cluster_wait();
#endif
}

template <typename T, int Halves, int Units>
void launch_gemm_swiglu_m256(const device::CudaStream &stream, const SwigluGemm<T> &p) {
    const GemmMaps maps{make_tensor_map<T, 5>(p.gate, {p.k, 8, 2, p.n / 8, 1},
                                              {p.k, p.up - p.gate, 8 * p.k, 8 * p.k},
                                              {8, 2, Units, 1}),
                        make_tensor_map<T, 2>(p.x, {p.k, p.m}, {p.ldx}, {Halves * 64})};
    const auto kernel = gemm_swiglu_m256_kernel<T, Halves, Units>;
    set_max_dynamic_smem(kernel, kSwigluM256Smem);
    const int64_t blocks = (p.n + 16 * Units - 1) / (16 * Units) * 2;
    launch(stream, kernel, unsigned(std::min<int64_t>(stream.n_sms / 2 * 2, blocks)),
           kSwigluM256Threads, kSwigluM256Smem, {true, 2}, maps, p);
}

template <typename T, int Halves>
void launch_gemm_swiglu_m256(const device::CudaStream &stream, const SwigluGemm<T> &p, int units) {
    dispatch_int<5, 7, 8, 9, 11, 12>(
        units, [&](auto n) { launch_gemm_swiglu_m256<T, Halves, n()>(stream, p); });
}

template <typename T>
void run_gemm_swiglu_m256(const device::CudaStream &stream, const SwigluGemm<T> &p, int units) {
    swiglu_m256_halves(p.m) == 1 ? launch_gemm_swiglu_m256<T, 1>(stream, p, units)
                                 : launch_gemm_swiglu_m256<T, 2>(stream, p, units);
}

} // namespace llaisys::ops::cuda
