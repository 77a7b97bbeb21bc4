// What gemm_tma_m96.cuh and gemm_tma_quant.cuh have in common but the main loop.
//
// A block owns up to 20 atoms and its consumer warps the sums of one atom of 16 weight rows each, as
// accumulators of wgmma. A cluster that splits K adds them in distributed shared memory: a fragment
// (one atom, 8 rows of x) is reduced by one of its blocks.
#pragma once

#include "ops/cuda/cluster.cuh"
#include "ops/cuda/gemm_tma_m96_config.cuh"
#include "ops/cuda/tma_pipeline.cuh"

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

// Share of a block in a product, and its mbarriers. The first n_groups * 4 warps compute, the next one
// loads weights and the last one x.
template <int Columns> struct TmaBlock {
    const AtomTiles &shape;
    uint32_t full, empty, exchange, buffer; // buffer: the stages
    int warp, lane, n_groups, rank;
    int first_atom, first_k_tile, own_k_tiles;
    TmaSums<Columns> result;

    __device__ __forceinline__ TmaBlock(const unsigned char *shared, const AtomTiles &tiles, int m)
        : shape(tiles), full(smem_address(shared)), empty(full + kM96MaxStages * 8),
          exchange(empty + kM96MaxStages * 8), buffer(full + kM96BarrierBytes),
          warp(__shfl_sync(kFullMask, threadIdx.x / kWarpSize, 0)), // warp-uniform
          lane(threadIdx.x % kWarpSize), n_groups((shape.atoms + 3) / 4),
          rank(int(blockIdx.x) % shape.cluster),
          first_atom(int(blockIdx.x) / shape.cluster * shape.atoms),
          first_k_tile(rank * shape.k_tiles),
          own_k_tiles(max(0, min(shape.k_tiles, shape.all_k_tiles - first_k_tile))),
          result{shape.cluster, shape.atoms, shape.n_atoms,        first_atom,
                 rank,          m,           full + shape.sums_at, exchange} {}

    __device__ __forceinline__ bool computes() const { return warp < n_groups * 4; }
    __device__ __forceinline__ bool loads_weights() const { return warp == n_groups * 4; }
    __device__ __forceinline__ bool loads_x() const { return warp == n_groups * 4 + 1; }
    __device__ __forceinline__ TmaPipeline stages() const {
        return {shape.n_stages, shape.stage_bytes, full, empty};
    }

    // Initializes the mbarriers: warps that load into a stage, arrivals that release it.
    __device__ __forceinline__ void init(int loading, int releases) const {
        if (threadIdx.x == n_groups * 128) {
            init_stages(full, empty, shape.n_stages, uint32_t(loading), uint32_t(releases));
            mbarrier_init(exchange, 1);
            fence_mbarrier_init();
            mbarrier_arrive_expect_tx(exchange, result.expected_bytes());
        }
        __syncthreads();
        if (shape.cluster > 1) {
            barrier_cluster_arrive_relaxed();
        }
    }
    // load(atom, in_head, head): load_atoms atoms of a K tile from `atom` of the block on.
    template <typename Load> __device__ __forceinline__ void load_atoms(const Load &load) const {
        int head = first_atom / shape.atoms_per_head;
        int in_head = first_atom - head * shape.atoms_per_head;
        for (int atom = 0; atom < shape.atoms; atom += shape.load_atoms) {
            load(atom, in_head, head);
            in_head += shape.load_atoms;
            head += in_head == shape.atoms_per_head ? 1 : 0;
            in_head = in_head == shape.atoms_per_head ? 0 : in_head;
        }
    }
    // Reduces the sums over the cluster and stores them; all warps.
    template <typename Epilogue, typename Store>
    __device__ __forceinline__ void finish(const float (&sums)[Columns / 2],
                                           const unsigned char *shared, const Epilogue &epilogue,
                                           const Store &store) const {
        if (shape.cluster == 1) {
            if (computes()) {
                result.store_own(sums, warp, epilogue, store);
            }
            return;
        }
        barrier_cluster_wait(); // peers have initialized their mbarriers
        if (computes()) {
            result.send(sums, warp);
        }
        result.reduce(reinterpret_cast<const float4 *>(shared + shape.sums_at), warp,
                      n_groups * 4 + 2, epilogue, store);
    }
};

// Whether the device has TMA, wgmma, and GPCs for the clusters.
inline bool has_tma_clusters(const device::CudaStream &stream) {
    return has_wgmma(stream) && encode_tensor_map() != nullptr && stream.n_sms >= 16;
}

// kernel(maps, shape, arguments...).
template <typename Kernel, typename Maps, typename Config, typename... Arguments>
void launch_gemm_tma(const device::CudaStream &stream, Kernel kernel, const Maps &maps,
                     const Config &shape, const Arguments &...arguments) {
    const int clusters = (shape.n_atoms + shape.atoms - 1) / shape.atoms;
    const int threads = (shape.atoms + 3) / 4 * 128 + 2 * kWarpSize;
    set_max_dynamic_smem(kernel, size_t(stream.max_shared_bytes));
    launch(stream, kernel, unsigned(clusters * shape.cluster), unsigned(threads), shape.bytes,
           {true, unsigned(shape.cluster)}, maps, shape, arguments...);
}

} // namespace llaisys::ops::cuda
