// GEMM for M up to 96 with TMA and wgmma on compute capability 9.0, out[m, n] = x[m, k] * w[n,
// k]^T, epilogues of gemm_epilogue.cuh (units of 8 items). Bound: reading the weights once from
// DRAM.
//
// out^T = w * x^T: an atom is the 8 + 8 weight rows of a unit; four atoms are the 64-row operand
// of wgmma; the rows of x (32, 64 or 96, zero-filled) are its columns. A block owns up to 20
// atoms and loops over k once, so that x is loaded with as many weights as possible: a pipeline
// stage holds one K tile (64 values) of all atoms and of x. One warp loads weights, one loads x,
// each consumer warpgroup computes four atoms. With too few atoms for all SMs, a cluster splits k
// (split-K): partial sums go to the blocks of the cluster through DSMEM, and each block reduces a
// share of them in split order.
//
// Weights are loaded before grid_dependency_wait(). The bits of an output row depend on n, k and
// the config, not on the other rows.
#pragma once

#include "ops/cuda/dispatch.cuh"
#include "ops/cuda/gemm_tma_m96_config.cuh"
#include "ops/cuda/gemm_tma_sums.cuh"
#include "ops/cuda/tma_pipeline.cuh"

namespace llaisys::ops::cuda {

template <typename T, int Columns, typename Epilogue>
__global__ void __launch_bounds__(kM96Threads, 1)
    gemm_tma_m96_kernel(const __grid_constant__ GemmMaps maps, M96Config shape, int m,
                        Epilogue epilogue) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    extern __shared__ __align__(1024) unsigned char shared[];
    const uint32_t full = smem_address(shared);
    const uint32_t empty = full + kM96MaxStages * 8;
    const uint32_t exchange = empty + kM96MaxStages * 8;
    const uint32_t buffer = full + kM96BarrierBytes;
    const int warp = __shfl_sync(kFullMask, threadIdx.x / kWarpSize, 0); // warp-uniform
    const int lane = threadIdx.x % kWarpSize;
    const int n_groups = (shape.atoms + 3) / 4;
    const int rank = int(blockIdx.x) % shape.cluster;
    const int first_atom = int(blockIdx.x) / shape.cluster * shape.atoms;
    const int first_k_tile = rank * shape.k_tiles;
    const int own_k_tiles = max(0, min(shape.k_tiles, shape.all_k_tiles - first_k_tile));
    const TmaSums<Columns> result{shape.cluster, shape.atoms, shape.n_atoms,        first_atom,
                                  rank,          m,           full + shape.sums_at, exchange};

    launch_dependents();
    if (threadIdx.x == n_groups * 128) {
        for (int stage = 0; stage < shape.n_stages; ++stage) {
            mbarrier_init(full + uint32_t(stage) * 8, 2);
            mbarrier_init(empty + uint32_t(stage) * 8, uint32_t(n_groups));
        }
        mbarrier_init(exchange, 1);
        fence_mbarrier_init();
        mbarrier_arrive_expect_tx(exchange, result.expected_bytes());
    }
    __syncthreads();
    if (shape.cluster > 1) {
        barrier_cluster_arrive_relaxed();
    }
    const TmaPipeline stages{shape.n_stages, shape.stage_bytes, full, empty};
    if (warp == n_groups * 4) {
        const uint64_t policy = l2_evict_first_policy();
        const int first_head = first_atom / shape.atoms_per_head;
        const int first_in_head = first_atom - first_head * shape.atoms_per_head;
        produce_stages(stages, first_k_tile, own_k_tiles, 1, buffer, shape.x_at,
                       shape.prefetch_stages, [&](uint32_t to, int k_tile, uint32_t barrier) {
                           int head = first_head, in_head = first_in_head;
                           for (int atom = 0; atom < shape.atoms; atom += shape.load_atoms) {
                               tma_load(to + uint32_t(atom) * kM96AtomBytes, &maps.w,
                                        k_tile * kTmaTileK, 0, 0, in_head, head, barrier, policy);
                               in_head += shape.load_atoms;
                               head += in_head == shape.atoms_per_head ? 1 : 0;
                               in_head = in_head == shape.atoms_per_head ? 0 : in_head;
                           }
                       });
    } else if (warp == n_groups * 4 + 1) {
        const uint64_t policy = l2_evict_last_policy();
        produce_stages(stages, first_k_tile, own_k_tiles, 1, buffer + shape.x_at,
                       shape.stage_bytes - shape.x_at, 0,
                       [&](uint32_t to, int k_tile, uint32_t barrier) {
                           tma_load(to, &maps.x, k_tile * kTmaTileK, 0, barrier, policy);
                       });
    }
    grid_dependency_wait();
    const auto store = [&](int atom, int row, float low, float high,
                           const typename Epilogue::Prepared &prepared) {
        epilogue.store(atom, lane / 4, row, low, high, prepared);
    };
    if (warp < n_groups * 4) {
        float sums[Columns / 2] = {};
        const int group = warp / 4;
        int stage = 0;
        int previous = -1; // stage read by the wgmma group in flight
        uint32_t parity = 0;
        for (int k_tile = 0; k_tile < own_k_tiles; ++k_tile) {
            mbarrier_wait_parity(full + uint32_t(stage) * 8, parity);
            const uint32_t at = buffer + uint32_t(stage) * shape.stage_bytes;
            mma_k_tile<T>(sums, at + uint32_t(group * 4) * kM96AtomBytes, at + shape.x_at);
            if (previous >= 0 && threadIdx.x % 128 == 0) {
                mbarrier_arrive(empty + uint32_t(previous) * 8);
            }
            previous = stage;
            const bool is_last = ++stage == shape.n_stages;
            stage = is_last ? 0 : stage;
            parity ^= is_last ? 1 : 0;
        }
        wgmma_wait_group<0>();
        fence_operands(sums);
        if (shape.cluster == 1) {
            result.store_own(sums, warp, epilogue, store);
            return;
        }
        barrier_cluster_wait(); // peers have initialized their mbarriers
        result.send(sums, warp);
    } else if (shape.cluster > 1) {
        barrier_cluster_wait();
    } else {
        return;
    }
    result.reduce(reinterpret_cast<const float4 *>(shared + shape.sums_at), warp, n_groups * 4 + 2,
                  epilogue, store);
#endif
}

// Whether the kernel supports this device, shape and config; cluster 0: another kernel is
// preferred.
template <typename T>
bool can_gemm_tma_m96(const device::CudaStream &stream, const GemmInput &in,
                      const AtomLayout<T> &layout, const M96Tuning &tuning) {
    return tuning.cluster > 0 && has_wgmma(stream) && encode_tensor_map() != nullptr && in.m >= 1 &&
           in.m <= kM96MaxM && in.k > 0 && in.k % 8 == 0 && in.ldx % 8 == 0 && layout.is_valid() &&
           stream.n_sms >= 16 &&
           m96_config(stream, layout, in.k, m96_columns(in.m), tuning).fits(stream);
}

template <typename T, int Columns, typename Epilogue>
void launch_gemm_tma_m96(const device::CudaStream &stream, const GemmInput &in,
                         const Epilogue &epilogue, const M96Tuning &tuning) {
    const AtomLayout<T> layout = epilogue.atoms();
    const M96Config shape = m96_config(stream, layout, in.k, Columns, tuning);
    const int64_t heads = (layout.count + layout.atoms_per_head - 1) / layout.atoms_per_head;
    const GemmMaps maps{
        make_tensor_map<T, 5>(layout.data, {in.k, 8, 2, layout.atoms_per_head, heads},
                              {in.k, layout.group_stride, layout.atom_stride, layout.head_stride},
                              {8, 2, uint32_t(shape.load_atoms), 1}),
        make_tensor_map<T, 2>(static_cast<const T *>(in.x), {in.k, in.m}, {in.ldx}, {Columns})};
    const int clusters = (shape.n_atoms + shape.atoms - 1) / shape.atoms;
    const int threads = (shape.atoms + 3) / 4 * 128 + 2 * kWarpSize;
    const auto kernel = gemm_tma_m96_kernel<T, Columns, Epilogue>;
    set_max_dynamic_smem(kernel, size_t(stream.max_shared_bytes));
    launch(stream, kernel, unsigned(clusters * shape.cluster), unsigned(threads), shape.bytes,
           {true, unsigned(shape.cluster)}, maps, shape, in.m, epilogue);
}

// in.x is set; in.m is at most kM96MaxM.
template <typename T, typename Epilogue>
void run_gemm_tma_m96(const device::CudaStream &stream, const GemmInput &in, Epilogue epilogue,
                      const M96Tuning &tuning) {
    epilogue.items = 8;
    dispatch_int<32, 64, 96>(m96_columns(in.m), [&](auto columns) {
        launch_gemm_tma_m96<T, columns()>(stream, in, epilogue, tuning);
    });
}

} // namespace llaisys::ops::cuda
