// GEMM for M up to 96 (int4: 128, int8: 32) with quantised weights (ops/quant_rows.hpp) on compute
// capability 9.0, out[m, n] = x[m, k] * w[n, k]^T, epilogues of gemm_epilogue.cuh (units of 8 items).
// Bound: reading the weights once from DRAM.
//
// The structure of gemm_tma_m96.cuh: out^T = w * x^T, a block owns up to 20 atoms of 16 weight rows
// and loops over k once.
//
//   int4   converted to bf16 in registers, the operand of wgmma on bf16; x is bf16
//   f8     wgmma on e4m3: the codes are the operand in shared memory. Rows of x are one or two e4m3
//          planes (quant_activations.cuh); both add to the same accumulators
//   int8   wgmma on e4m3: a nibble q as a byte is the number q * 2^-9, and q + 128 is two nibbles: two
//          products
//
// The sums of a group of f8 (128 values) and int8 (32 at most) are scaled and added in f32: the
// accumulators of wgmma on e4m3 keep about 14 bits. The minimum of an int8 group times the sum of its
// x is added with it.
#pragma once

#include "ops/cuda/dispatch.cuh"
#include "ops/cuda/gemm_tma_quant_rows.cuh"
#include "ops/cuda/gemm_tma_quant_tile.cuh"
#include "ops/cuda/gemm_tma_sums.cuh"
#include "ops/cuda/tma_pipeline.cuh"

namespace llaisys::ops::cuda {

// w: codes, params: parameters of the groups, x: planes, sums: of groups of 32 values of x
struct QuantTmaMaps {
    CUtensorMap w, params, x, sums;
};

template <QuantCodes Codes, int Columns, typename Epilogue>
__global__ void __launch_bounds__(quant_tma_threads(Columns), 1)
    gemm_tma_quant_kernel(const __grid_constant__ QuantTmaMaps maps, QuantTmaConfig shape, int m,
                          QuantMatrix weights, const float *x_scales, GemmInput in,
                          Epilogue epilogue) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    extern __shared__ __align__(1024) unsigned char shared[];
    constexpr bool kIsInt4 = Codes == QuantCodes::int4;
    constexpr bool kIsF8 = Codes == QuantCodes::f8;
    constexpr int kSegment = int(quant_segment(Codes));
    constexpr int kTile = quant_tile_values(Codes);
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
            mbarrier_init(full + uint32_t(stage) * 8, shape.keeps_x ? 1 : 2);
            mbarrier_init(empty + uint32_t(stage) * 8, uint32_t(n_groups) * 4);
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
        produce_stages(
            stages, first_k_tile, own_k_tiles, 1, buffer, shape.weight_bytes, shape.prefetch_stages,
            [&](uint32_t to, int k_tile, uint32_t barrier) {
                const int value = k_tile * kTile;
                const int segment = value / kSegment;
                const int in_segment = value - segment * kSegment;
                const int at = segment * shape.segment_bytes;
                const int codes_at = at + (kIsInt4 ? in_segment / 2 : in_segment);
                const int values = min(kSegment, shape.k - segment * kSegment);
                const int params_at = at + (kIsInt4 ? values / 2 : values) +
                                      (in_segment / kTile * shape.tile_param_bytes & ~15);
                int head = first_head, in_head = first_in_head;
                for (int atom = 0; atom < shape.atoms; atom += shape.load_atoms) {
                    tma_load(to + uint32_t(atom) * kM96AtomBytes, &maps.w, codes_at, 0, 0, in_head,
                             head, barrier, policy);
                    if (shape.param_row > 0) {
                        tma_load(to + shape.params_at + uint32_t(atom * 16) * shape.param_row,
                                 &maps.params, params_at, 0, 0, in_head, head, barrier, policy);
                    }
                    in_head += shape.load_atoms;
                    head += in_head == shape.atoms_per_head ? 1 : 0;
                    in_head = in_head == shape.atoms_per_head ? 0 : in_head;
                }
            });
    } else if (warp == n_groups * 4 + 1 && !shape.keeps_x) {
        const uint64_t policy = l2_evict_last_policy();
        produce_stages(stages, first_k_tile, own_k_tiles, 1, buffer + shape.x_at, shape.x_bytes, 0,
                       [&](uint32_t to, int k_tile, uint32_t barrier) {
                           const int tiles = kIsInt4 ? kTile / kTmaTileK : shape.planes;
                           for (int i = 0; i < tiles; ++i) {
                               tma_load(to + uint32_t(i * Columns) * kTmaRowBytes, &maps.x,
                                        kIsInt4 ? (k_tile * kTile + i * kTmaTileK) * 2
                                                : k_tile * kTile,
                                        0, kIsInt4 ? 0 : i, barrier);
                           }
                           if constexpr (Codes == QuantCodes::int8) {
                               tma_load(to + shape.x_sums_at - shape.x_at, &maps.sums,
                                        k_tile * shape.x_sums_row, 0, barrier, policy);
                           }
                       });
    }
    grid_dependency_wait();
    // The sums lack the scale of the weight row.
    const auto store = [&](int atom, int row, float low, float high,
                           const typename Epilogue::Prepared &prepared) {
        const float low_scale =
            !kIsF8 ? 1.0f : weights.row_scale(epilogue.row_index(atom, 0, lane / 4));
        const float high_scale =
            !kIsF8 ? 1.0f : weights.row_scale(epilogue.row_index(atom, 1, lane / 4));
        epilogue.store(atom, lane / 4, row, low * low_scale, high * high_scale, prepared);
    };
    if (warp < n_groups * 4) {
        float sums[Columns / 2] = {};
        const int own_atom = min(warp, shape.atoms - 1); // sums of other warps are dropped
        auto *scratch = reinterpret_cast<float *>(shared + kM96BarrierBytes / 2);
        if constexpr (Columns == 8 && !kIsInt4) {
            if (shape.keeps_x && in.residual != nullptr) {
                keep_quant_rows<Codes, true, Columns>(in, shape, shared, scratch,
                                                      first_k_tile * kTile, own_k_tiles * kTile,
                                                      n_groups * 4);
            } else if (shape.keeps_x) {
                keep_quant_rows<Codes, false, Columns>(in, shape, shared, scratch,
                                                       first_k_tile * kTile, own_k_tiles * kTile,
                                                       n_groups * 4);
            }
        }
        int stage = 0;
        uint32_t parity = 0;
        for (int k_tile = 0; k_tile < own_k_tiles; ++k_tile) {
            mbarrier_wait_parity(full + uint32_t(stage) * 8, parity);
            const uint32_t offset = kM96BarrierBytes + uint32_t(stage) * shape.stage_bytes;
            const unsigned char *at = shared + offset;
            const int in_segment = (first_k_tile + k_tile) % (kSegment / kTile);
            const unsigned char *low_params = at + shape.params_at +
                                              uint32_t(own_atom * 16 + lane / 4) * shape.param_row +
                                              (in_segment * shape.tile_param_bytes & 15);
            const unsigned char *high_params = low_params + 8 * shape.param_row;
            constexpr uint32_t plane_bytes = uint32_t(kTile / 128 * Columns) * kTmaRowBytes;
            uint32_t x_at = full + offset + shape.x_at;
            const unsigned char *x_sums = at + shape.x_sums_at;
            if (Columns == 8 && shape.keeps_x) {
                x_at = full + shape.kept_at + uint32_t(k_tile) * 2 * plane_bytes;
                x_sums = shared + shape.kept_sums_at +
                         uint32_t(k_tile * Columns) * uint32_t(shape.x_sums_row);
            }
            if constexpr (kIsInt4) {
                QuantTile<Codes, Columns>::add_int4(
                    sums, at + own_atom * kM96AtomBytes, low_params, high_params, shape.group_shift,
                    (shape.k - (first_k_tile + k_tile) * kTile) / 32, x_at);
            } else if constexpr (!kIsF8) {
                QuantTile<Codes, Columns>::add_int8(
                    sums, at + own_atom * kM96AtomBytes, low_params, high_params,
                    weights.layout.param_bytes, shape.group_shift,
                    shape.k - (first_k_tile + k_tile) * kTile, x_at, plane_bytes,
                    reinterpret_cast<const float *>(x_sums));
            } else {
                float low_s = 1, high_s = 1;
                if (shape.param_row > 0) {
                    low_s = __uint_as_float(
                        uint32_t(*reinterpret_cast<const uint16_t *>(low_params)) << 16);
                    high_s = __uint_as_float(
                        uint32_t(*reinterpret_cast<const uint16_t *>(high_params)) << 16);
                }
                QuantTile<Codes, Columns>::add_f8(
                    sums, full + offset + uint32_t(warp / 4 * 4) * kM96AtomBytes, x_at, plane_bytes,
                    shape.planes, low_s, high_s);
            }
            __syncwarp();
            if (lane == 0) {
                mbarrier_arrive(empty + uint32_t(stage) * 8);
            }
            const bool is_last = ++stage == shape.n_stages;
            stage = is_last ? 0 : stage;
            parity ^= is_last ? 1 : 0;
        }
        // int4: the factor of the codes; otherwise x = scale * planes
#pragma unroll
        for (int i = 0; i < Columns / 2; ++i) {
            if constexpr (kIsInt4) {
                sums[i] *= 1 / kQuantFactor<bf16>;
                continue;
            }
            const int row = i / 4 * 8 + lane % 4 * 2 + i % 2;
            const float *x_scale =
                shape.keeps_x ? scratch + 2 * kM96MaxAtoms + row : x_scales + row;
            sums[i] *= row < m ? *x_scale * (kIsF8 ? 1.0f : 512.0f) : 0.0f;
        }
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

template <QuantCodes Codes, int Columns, typename Epilogue>
void launch_gemm_tma_quant(const device::CudaStream &stream, const GemmInput &in,
                           const QuantRows &x, const QuantMatrix &w, const Epilogue &epilogue,
                           const M96Tuning &tuning) {
    const AtomRows rows = epilogue.atom_rows();
    const QuantTmaConfig s =
        quant_tma_config(stream, w.layout, rows, in.k, Columns, x.planes,
                         Codes != QuantCodes::int4 && x.values == nullptr, tuning);
    const int64_t heads = (rows.count + rows.atoms_per_head - 1) / rows.atoms_per_head;
    const int64_t pitch = w.row_bytes;
    const auto weight_map = [&](uint32_t columns, CUtensorMapSwizzle swizzle) {
        return make_byte_map<5>(w.bytes, {pitch, 8, 2, rows.atoms_per_head, heads},
                                {pitch, rows.group * pitch, rows.atom * pitch, rows.head * pitch},
                                {columns, 8, 2, uint32_t(s.load_atoms), 1}, swizzle);
    };
    QuantTmaMaps maps{};
    maps.w = weight_map(kQuantTileBytes, CU_TENSOR_MAP_SWIZZLE_128B);
    maps.params = s.param_row > 0 ? weight_map(s.param_row, CU_TENSOR_MAP_SWIZZLE_NONE) : maps.w;
    if constexpr (Codes == QuantCodes::int4) {
        maps.x = make_byte_map<3>(static_cast<const unsigned char *>(in.x), {in.k * 2, in.m, 1},
                                  {in.ldx * 2, in.ldx * 2 * in.m}, {128, Columns, 1},
                                  CU_TENSOR_MAP_SWIZZLE_128B);
    } else {
        maps.x = s.keeps_x ? maps.w
                           : make_byte_map<3>(x.values, {x.k, x.m, x.planes}, {x.k, x.k * x.m},
                                              {128, Columns, 1}, CU_TENSOR_MAP_SWIZZLE_128B);
    }
    maps.sums =
        Codes != QuantCodes::int8 || s.keeps_x
            ? maps.x
            : make_byte_map<2>(reinterpret_cast<const unsigned char *>(x.sums),
                               {x.k / x.sum_values * 4, x.m}, {x.sums_pitch() * 4},
                               {uint32_t(s.x_sums_row), Columns}, CU_TENSOR_MAP_SWIZZLE_NONE);
    const int clusters = (s.n_atoms + s.atoms - 1) / s.atoms;
    const int threads = (s.atoms + 3) / 4 * 128 + 2 * kWarpSize;
    const auto kernel = gemm_tma_quant_kernel<Codes, Columns, Epilogue>;
    set_max_dynamic_smem(kernel, size_t(stream.max_shared_bytes));
    launch(stream, kernel, unsigned(clusters * s.cluster), unsigned(threads), s.bytes,
           {true, unsigned(s.cluster)}, maps, s, in.m, w, x.scales, in, epilogue);
}

// Whether the kernel supports this device, layout and shape.
inline bool can_gemm_tma_quant(const device::CudaStream &stream, const QuantRowLayout &layout,
                               const AtomRows &rows, int64_t m, int64_t k) {
    const bool has_codes = layout.codes != QuantCodes::int4 || layout.group >= 32;
    return has_codes && !stream.is_exact && has_wgmma(stream) && encode_tensor_map() != nullptr &&
           m >= 1 && m <= quant_tma_rows(layout.codes) && k > 0 &&
           k % (layout.codes == QuantCodes::f8 ? 128 : 32) == 0 && rows.count > 0 &&
           stream.n_sms >= 16;
}

template <QuantCodes Codes, typename Epilogue>
void run_gemm_tma_quant(device::CudaStream &stream, const GemmInput &in, const QuantMatrix &w,
                        Epilogue epilogue) {
    constexpr int kPlanes = 2; // of x
    epilogue.items = 8;
    const AtomRows rows = epilogue.atom_rows();
    const M96Tuning tuning =
        quant_tma_tuning(stream, w.layout, rows, in.k, quant_tma_columns(in.m));
    QuantRows x{};
    x.planes = kPlanes;
    if (Codes != QuantCodes::int4 && !quant_tma_keeps_x(stream, w.layout, rows, in, tuning)) {
        x = quantise_rows<bf16>(stream, in, w.layout, kPlanes);
    }
    dispatch_int<8, 16, 32, 64, 96, 128>(quant_tma_columns(in.m), [&](auto columns) {
        if constexpr (columns() <= quant_tma_rows(Codes)) {
            launch_gemm_tma_quant<Codes, columns()>(stream, in, x, w, epilogue, tuning);
        }
    });
}

} // namespace llaisys::ops::cuda
