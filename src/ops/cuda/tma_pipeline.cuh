// Producer and consumer of the TMA pipelines of gemm_tma_splitk.cuh and gemm_tma_m96.cuh.
#pragma once

#include "ops/cuda/mbarrier.cuh"
#include "ops/cuda/wgmma.cuh"

namespace llaisys::ops::cuda {

// Pipeline stages and their mbarriers: addresses in shared memory, 8 bytes per mbarrier.
struct TmaPipeline {
    int n;
    uint32_t bytes; // of one stage
    uint32_t full, empty;
};

// Producer, one warp: loads the K tiles [first, first + count), `step` per stage, to offset `to`
// of successive stages. copy(to, k_tile, barrier) issues the load of `bytes`. The first `early`
// stages are loaded before grid_dependency_wait(). The loop is warp-uniform so that addresses
// stay in uniform registers.
template <typename Copy>
__device__ __forceinline__ void produce_stages(const TmaPipeline &stages, int first, int count,
                                               int step, uint32_t to, uint32_t bytes, int early,
                                               const Copy &copy) {
    int stage = 0;
    uint32_t round = 0;
    for (int k_tile = 0; k_tile < count; k_tile += step) {
        if (early-- == 0) {
            grid_dependency_wait();
        }
        if (round > 0) {
            mbarrier_wait_parity(stages.empty + uint32_t(stage) * 8, (round - 1) & 1);
        }
        if (elect_sync()) {
            const uint32_t full = stages.full + uint32_t(stage) * 8;
            mbarrier_arrive_expect_tx(full, bytes);
            copy(to + uint32_t(stage) * stages.bytes, first + k_tile, full);
        }
        __syncwarp();
        if (++stage == stages.n) {
            stage = 0;
            ++round;
        }
    }
}

// Consumer, one warpgroup: acc += w * x^T over one K tile (64 values of k) at these addresses. On
// return the previous group of wgmma has completed.
template <typename T, int N>
__device__ __forceinline__ void mma_k_tile(float (&sums)[N], uint32_t w_at, uint32_t x_at) {
    const uint64_t x = k_major_descriptor(x_at);
    const uint64_t w = k_major_descriptor(w_at);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < 4; ++k) { // advance 32 bytes each
        Wgmma<T>::k_major(sums, w + uint64_t(k * 2), x + uint64_t(k * 2), 1);
    }
    wgmma_commit_group();
    wgmma_wait_group<1>();
}

} // namespace llaisys::ops::cuda
