// Pipeline and reduction of gemm_small_m_bulk.cuh and gemm_small_m_quant.cuh: one block per SM,
// consumer warps and 2 producer warps. A pipeline stage holds a chunk of k of every weight row of a
// unit, one bulk copy per row, and the same chunk of x where x is streamed. A full and an empty
// mbarrier guard each stage. One producer warp issues copies too slowly (74 % of the bandwidth); two
// alternate over the stages; four are slower again.
#pragma once

#include "ops/cuda/gemm_small_m_bulk_config.cuh"
#include "ops/cuda/mbarrier.cuh"

namespace llaisys::ops::cuda {

// Producer warp: fills every kBulkProducerWarps-th stage from stage `producer` on. Lanes that copy a
// weight row find it once per unit: find_row(unit), null: none. from: its initial value.
// copy(from, chunk, stage, has_input): loads of a lane; x only when has_input. copy_x(chunk, stage):
// those of x alone. bytes(present, chunk): of a stage, present: mask of the lanes with a `from`.
template <typename Row, typename FindRow, typename Copy, typename CopyX, typename Bytes>
__device__ __forceinline__ void
produce_units(const UnitStages &shape, int own_units, uint32_t full, uint32_t empty, int producer,
              bool is_weight, const Row *from, const FindRow &find_row, const Copy &copy,
              const CopyX &copy_x, const Bytes &bytes) {
    const int total = own_units * shape.chunks;
    const int n_early = min(shape.prefetch_stages, total); // at most n_stages
    const auto copy_early_x = [&] {                        // x of the prefetched stages
        grid_dependency_wait();
#pragma unroll 1
        for (int e = producer; e < n_early; e += kBulkProducerWarps) {
            copy_x(e % shape.chunks, e);
        }
    };
    bool has_input = false;
    int unit_at = -1; // unit of `from`
    int stage = producer;
    uint32_t round = 0;
    for (int s = producer; s < total; s += kBulkProducerWarps) {
        if (s >= n_early && !has_input) {
            copy_early_x();
            has_input = true;
        }
        const int chunk = s % shape.chunks;
        if (is_weight && s / shape.chunks != unit_at) {
            unit_at = s / shape.chunks;
            from = find_row(int(blockIdx.x) + unit_at * int(gridDim.x));
        }
        if (round > 0) {
            mbarrier_wait_parity(empty + uint32_t(stage) * 8, (round - 1) & 1);
        }
        const unsigned present = __ballot_sync(kFullMask, from != nullptr);
        if (threadIdx.x % kWarpSize == 0) {
            mbarrier_arrive_expect_tx(full + uint32_t(stage) * 8, bytes(present, chunk));
        }
        __syncwarp();
        copy(from, chunk, stage, s >= n_early);
        stage += kBulkProducerWarps;
        if (stage >= shape.n_stages) {
            stage -= shape.n_stages;
            ++round;
        }
    }
    if (!has_input) {
        copy_early_x();
    }
}

// Sums of both groups of rows for one item and row of x, in the order of the warps.
template <int Warps>
__device__ __forceinline__ float2 sum_of_warps(const float *sums, int i, int row, uint32_t pitch) {
    float low = 0, high = 0;
#pragma unroll
    for (int warp = 0; warp < Warps; ++warp) {
        const float *of_warp = sums + (warp * 16 + i) * pitch + row;
        low += of_warp[0];
        high += of_warp[8 * pitch];
    }
    return {low, high};
}

// kernel(arguments..., epilogue, n_units, shape). configure(rounds): the shape, where a block has at
// most `rounds` units.
template <typename Kernel, typename Epilogue, typename Configure, typename... Arguments>
void launch_units(const device::CudaStream &stream, Kernel kernel, unsigned threads,
                  const Epilogue &epilogue, const Configure &configure,
                  const Arguments &...arguments) {
    const UnitGrid grid(stream, epilogue);
    const auto shape = configure(grid.rounds);
    set_max_dynamic_smem(kernel,
                         size_t(stream.max_shared_bytes)); // the largest config of any launch
    launch(stream, kernel, grid.blocks, threads, shape.bytes, true, arguments..., epilogue,
           grid.n_units, shape);
}

} // namespace llaisys::ops::cuda
