// Producers and consumers of the TMA pipelines of the GEMMs with wgmma.
#pragma once

#include "ops/cuda/mbarrier.cuh"
#include "ops/cuda/tma.cuh"
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

// Position in a pipeline, continued from tile to tile.
template <int Stages> struct PipelineStage {
    uint32_t parity = 0; // of its current round
    int index = 0;
    __device__ __forceinline__ void next() {
        if (++index == Stages) {
            index = 0;
            parity ^= 1;
        }
    }
};

// Consumer, one warpgroup: sums of Halves * 64 rows of a with the rows of b over k_tiles stages. of_a,
// of_b: descriptors in the first stage; release(index): a stage has been read. fence_operands()
// before sums are used.
template <typename T, uint32_t StageBytes, int Stages, int Halves, int N, typename Release>
__device__ __forceinline__ void mma_k_tiles(float (&sums)[Halves][N], int k_tiles, uint64_t of_a,
                                            uint64_t of_b, uint32_t full,
                                            PipelineStage<Stages> &stage, const Release &release) {
    constexpr uint32_t kHalfBytes = 64 * kTmaRowBytes;
    int previous = 0;
    for (int k_tile = 0; k_tile < k_tiles; ++k_tile) {
        mbarrier_wait_parity(full + stage.index * 8, stage.parity);
        const uint64_t at = uint64_t(stage.index) * (StageBytes >> 4);
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < 4; ++k) { // advance 32 bytes each
#pragma unroll
            for (int half = 0; half < Halves; ++half) {
                Wgmma<T>::k_major(sums[half],
                                  of_a + at + uint64_t(k * 2 + half * (kHalfBytes >> 4)),
                                  of_b + at + uint64_t(k * 2), k_tile > 0 || k > 0);
            }
        }
        wgmma_commit_group();
        if (k_tile > 0) { // the previous group of wgmma has completed
            wgmma_wait_group<1>();
            release(previous);
        }
        previous = stage.index;
        stage.next();
    }
    wgmma_wait_group<0>();
    release(previous);
}

} // namespace llaisys::ops::cuda
