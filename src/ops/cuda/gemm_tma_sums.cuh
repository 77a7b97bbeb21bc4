// Epilogue of gemm_tma_m96.cuh and gemm_tma_quant.cuh: each consumer warp has the sums of one atom of
// 16 weight rows, as accumulators of wgmma. A cluster that splits K adds them in distributed shared
// memory: a fragment (one atom, 8 rows of x) is reduced by one of its blocks.
#pragma once

#include "ops/cuda/cluster.cuh"
#include "ops/cuda/gemm_tma_m96_config.cuh"
#include "ops/cuda/mbarrier.cuh"

namespace llaisys::ops::cuda {

template <int Columns> struct TmaSums {
    static constexpr int kFragments = Columns / 8; // per atom
    int cluster, atoms;                            // blocks per cluster; atoms per cluster
    int n_atoms, first_atom;                       // in all; of this cluster
    int rank, m;                                   // of the block; rows of x
    uint32_t sums, exchange;                       // shared memory: partial sums, mbarrier

    __device__ __forceinline__ int own_fragments() const {
        return (atoms * kFragments - rank + cluster - 1) / cluster;
    }
    __device__ __forceinline__ int max_fragments() const { // per block
        return (atoms * kFragments + cluster - 1) / cluster;
    }
    __device__ __forceinline__ uint32_t expected_bytes() const {
        return uint32_t(cluster * own_fragments()) * kM96FragmentBytes;
    }

    // Stores the sums of this warp; cluster is 1. store(atom, row, low, high, prepared).
    template <typename Epilogue, typename Store>
    __device__ __forceinline__ void store_own(const float (&own)[Columns / 2], int warp,
                                              const Epilogue &epilogue, const Store &store) const {
        const int lane = threadIdx.x % kWarpSize;
        const int atom = first_atom + warp;
#pragma unroll
        for (int j = 0; j < Columns / 8; ++j) {
#pragma unroll
            for (int c = 0; c < 2; ++c) {
                const int row = 8 * j + lane % 4 * 2 + c;
                if (warp < atoms && atom < n_atoms && row < m) {
                    const auto operands = load_operands(epilogue, atom, lane / 4, row);
                    store(atom, row, own[4 * j + c], own[4 * j + 2 + c],
                          epilogue.prepare(atom, lane / 4, operands));
                }
            }
        }
    }

    // Sends the sums of this warp to the blocks that reduce them.
    __device__ __forceinline__ void send(const float (&own)[Columns / 2], int warp) const {
        if (warp >= atoms) {
            return;
        }
        const auto lane = threadIdx.x % kWarpSize;
#pragma unroll
        for (int j = 0; j < Columns / 8; ++j) {
            const int fragment = warp * kFragments + j;
            const auto block = uint32_t(fragment % cluster);
            const int slot = rank * max_fragments() + fragment / cluster;
            st_async(mapa(sums + uint32_t(slot) * kM96FragmentBytes + uint32_t(lane) * 16, block),
                     make_float4(own[4 * j], own[4 * j + 1], own[4 * j + 2], own[4 * j + 3]),
                     mapa(exchange, block));
        }
    }

    // Reduces and stores the fragments of this block, by all its warps. all: the partial sums.
    template <typename Epilogue, typename Store>
    __device__ __forceinline__ void reduce(const float4 *all, int warp, int n_warps,
                                           const Epilogue &epilogue, const Store &store) const {
        const int lane = threadIdx.x % kWarpSize;
        bool has_partials = false; // of all blocks
        for (int i = warp; i < own_fragments(); i += n_warps) {
            const int fragment = i * cluster + rank;
            const int atom = first_atom + fragment / kFragments;
            const int row = fragment % kFragments * 8 + lane % 4 * 2; // and the next
            typename Epilogue::Operands operands[2] = {};
#pragma unroll
            for (int c = 0; c < 2; ++c) { // loads overlap with the arrival of the partial sums
                if (atom < n_atoms && row + c < m) {
                    operands[c] = load_operands(epilogue, atom, lane / 4, row + c);
                }
            }
            const typename Epilogue::Prepared prepared[2] = {
                epilogue.prepare(atom, lane / 4, operands[0]),
                epilogue.prepare(atom, lane / 4, operands[1])};
            if (!has_partials) {
                mbarrier_wait_parity_cluster(exchange, 0);
                has_partials = true;
            }
            float4 total = all[i * kWarpSize + lane];
            for (int part = 1; part < cluster; ++part) {
                const float4 more = all[(part * max_fragments() + i) * kWarpSize + lane];
                total = make_float4(total.x + more.x, total.y + more.y, total.z + more.z,
                                    total.w + more.w);
            }
            if (atom < n_atoms && row < m) {
                store(atom, row, total.x, total.z, prepared[0]);
            }
            if (atom < n_atoms && row + 1 < m) {
                store(atom, row + 1, total.y, total.w, prepared[1]);
            }
        }
        if (!has_partials) {
            mbarrier_wait_parity_cluster(exchange, 0); // peers store to a block until then
        }
    }
};

} // namespace llaisys::ops::cuda
