// GEMM for M 1 to 16 with quantised weights (ops/quant_rows.hpp) on compute capability 9, epilogues
// of gemm_epilogue.cuh. Bound: reading the weights once from DRAM.
//
// The pipeline of gemm_small_m_stages.cuh. A consumer warp has one slice of 128 (int4) or 64 values
// of every segment.
//
//   int4, int8   codes are the operand of mma.sync on signed bytes: int4 takes three integer
//                instructions per eight codes, int8 none. The two bytes of a row of x
//                (quant_small_rows.cuh) are two columns of the other operand, so that one mma has
//                four rows of x. The integer sums of a group are exact; they are scaled and added in
//                f32, with the minimum of the group times the sum of its x. A sum is read as the bits
//                of a float near 1.5 * 2^23.
//   f8           codes are converted to f16, which is exact, one instruction per pair
//
// x is quantised by every block when it has few values, otherwise by a kernel; then it is kept in
// shared memory, or streamed with the weights when it is too large.
//
// The bits of an output row depend on k only, not on m or n.
#pragma once

#include "ops/cuda/gemm_small_m_bulk_norm.cuh"
#include "ops/cuda/gemm_small_m_slices.cuh"
#include "ops/cuda/quant_small_rows.cuh"

namespace llaisys::ops::cuda {

template <typename T, QuantCodes Codes, typename Epilogue>
__global__ void __launch_bounds__(kQuantThreads, 1)
    gemm_small_m_quant_kernel(GemmInput in, SmallRows rows, QuantMatrix w, Epilogue epilogue,
                              int n_units, SmallConfig shape) {
#if __CUDA_ARCH__ >= 900
    constexpr int kSegment = int(quant_segment(Codes));
    constexpr int kSlice = quant_slice(Codes);
    constexpr bool kIsInt4 = Codes == QuantCodes::int4;
    extern __shared__ __align__(1024) unsigned char shared[];
    const uint32_t full = smem_address(shared) + shape.barriers_at;
    const uint32_t empty = full + uint32_t(shape.n_stages) * 8;
    const uint32_t x_full = empty + uint32_t(shape.n_stages) * 8;
    const int lane = threadIdx.x % kWarpSize;
    const int warp = threadIdx.x / kWarpSize;
    const int own_units = (n_units - int(blockIdx.x) + int(gridDim.x) - 1) / int(gridDim.x);

    launch_dependents();
    if (warp == kQuantWarps && lane == 0) {
        for (int i = 0; i < shape.n_stages; ++i) {
            mbarrier_init(full + uint32_t(i) * 8, 1);
            mbarrier_init(empty + uint32_t(i) * 8, kQuantWarps);
        }
        mbarrier_init(x_full, 1);
        fence_mbarrier_init();
    }
    if (in.residual != nullptr && warp < kBulkConsumerWarps) {
        prefetch_norm_weight(in);
    }
    __syncthreads(); // reached by all warps: the barrier is aligned
    const bool is_streamed = shape.x == SmallX::streamed;
    if (warp >= kQuantWarps) {
        produce_quant_stages(w, epilogue, StreamedX{rows, kSegment, in.k, is_streamed}, own_units,
                             shape, smem_address(shared), full, empty, warp - kQuantWarps);
        return;
    }
    grid_dependency_wait();
    auto *squares = reinterpret_cast<float *>(shared + shape.scratch_at); // [m, kQuantWarps]
    if (shape.x == SmallX::own) {
        const SmallRows to{shared + shape.x_at,
                           reinterpret_cast<float2 *>(shared + shape.scales_at), nullptr, in.m,
                           shape.group_shift};
        for (int row = 0; row < in.m; ++row) {
            const float own = in.residual != nullptr
                                  ? quantise_small_row<T, true, Codes>(in, row, to)
                                  : quantise_small_row<T, false, Codes>(in, row, to);
            const float of_warp = warp_sum(own);
            if (lane == 0) {
                squares[row * kQuantWarps + warp] = of_warp;
            }
        }
        named_barrier_sync<kQuantBarrier, kQuantConsumers>();
    } else if (shape.x == SmallX::kept) {
        if (threadIdx.x == 0) {
            const uint32_t planes = shape.scales_at - shape.x_at;
            const uint32_t scales = shape.sums_at - shape.scales_at;
            const uint64_t policy = l2_evict_last_policy();
            mbarrier_arrive_expect_tx(x_full, planes + scales);
            cp_async_bulk(smem_address(shared) + shape.x_at, rows.values, planes, x_full, policy);
            cp_async_bulk(smem_address(shared) + shape.scales_at, rows.scales, scales, x_full,
                          policy);
        }
        mbarrier_wait_parity(x_full, 0);
    }

    const int g = lane / 4;
    // A unit may have fewer rows than the group: read another row, its sums are dropped.
    const uint32_t low_at = uint32_t(min(g, epilogue.items - 1)) * shape.row_pitch;
    const uint32_t high_at = low_at + uint32_t(epilogue.items) * shape.row_pitch;
    const uint32_t stage_x = 2 * uint32_t(epilogue.items) * shape.row_pitch;
    const bool stores = threadIdx.x < 8 * in.m;
    float factor = 1;
    if (stores && shape.x != SmallX::own) {
        factor = rows.factors[threadIdx.x / 8];
    } else if (stores && in.residual != nullptr) {
        factor = small_row_factor(squares + threadIdx.x / 8 * kQuantWarps, in);
    }
    auto *sums = reinterpret_cast<float *>(shared + shape.sums_at);
    int stage = 0;
    uint32_t parity = 0;
    int buffer = 0;
    for (int unit = blockIdx.x; unit < n_units; unit += gridDim.x) {
        typename Epilogue::Operands operands{};
        float low_scale = factor, high_scale = factor;
        if (stores) {
            const int i = int(threadIdx.x) % 8;
            operands = load_operands(epilogue, unit, i, int(threadIdx.x) / 8);
            if constexpr (Codes == QuantCodes::f8) {
                low_scale *= w.row_scale(max(int64_t(0), epilogue.row_index(unit, 0, i)));
                high_scale *= w.row_scale(max(int64_t(0), epilogue.row_index(unit, 1, i)));
            }
        }
        float acc[8] = {};
        for (int segment = 0; segment < shape.segments; ++segment) {
            const int values = min(kSegment, in.k - segment * kSegment);
            const int first = warp * kSlice;
            mbarrier_wait_parity(full + uint32_t(stage) * 8, parity);
            if (first < values) {
                const unsigned char *at = shared + uint32_t(stage) * shape.stage_bytes;
                const int codes = kIsInt4 ? values / 2 : values; // bytes
                QuantSlice slice{at + low_at,          at + high_at, at + low_at + codes,
                                 at + high_at + codes, nullptr,      nullptr,
                                 w.layout.param_bytes, in.m};
                if (is_streamed) {
                    slice.values = at + stage_x;
                    slice.scales =
                        reinterpret_cast<const float2 *>(slice.values + in.m * kSegment * 2);
                } else {
                    slice.values = shared + shape.x_at + segment * in.m * kSegment * 2;
                    slice.scales = reinterpret_cast<const float2 *>(shared + shape.scales_at) +
                                   (segment * in.m * kSegment >> shape.group_shift);
                }
                if constexpr (Codes == QuantCodes::f8) {
                    add_f8_slice(acc, slice, first);
                } else if (w.layout.group == 32) {
                    add_int_slice<Codes, 32>(acc, slice, first, values - first);
                } else if (w.layout.group == 16) {
                    add_int_slice<Codes, 16>(acc, slice, first, values - first);
                } else {
                    add_int_slice<Codes, 128>(acc, slice, first, values - first);
                }
            }
            __syncwarp();
            if (lane == 0) {
                mbarrier_arrive(empty + uint32_t(stage) * 8);
            }
            if (++stage == shape.n_stages) {
                stage = 0;
                parity ^= 1;
            }
        }
        float *own_sums = sums + ((buffer * kQuantWarps + warp) * 16 + g) * shape.sums_pitch;
#pragma unroll
        for (int i = 0; i < 4; ++i) { // rows of x of this lane
            const int row =
                Codes == QuantCodes::f8 ? i / 2 * 8 + lane % 4 * 2 + i % 2 : i * 4 + lane % 4;
            if (row < in.m) {
                own_sums[row] = Codes == QuantCodes::f8 ? acc[i / 2 * 4 + i % 2] : acc[2 * i];
                own_sums[8 * shape.sums_pitch + row] =
                    Codes == QuantCodes::f8 ? acc[i / 2 * 4 + 2 + i % 2] : acc[2 * i + 1];
            }
        }
        // The double buffer of the next but one unit is free when all warps arrive here again.
        named_barrier_sync<kQuantBarrier, kQuantConsumers>();
        if (stores) {
            const int i = threadIdx.x % 8;
            const int row = threadIdx.x / 8;
            float low_sum = 0;
            float high_sum = 0;
#pragma unroll
            for (int of = 0; of < kQuantWarps; ++of) {
                const float *of_warp =
                    sums + ((buffer * kQuantWarps + of) * 16 + i) * shape.sums_pitch + row;
                low_sum += of_warp[0];
                high_sum += of_warp[8 * shape.sums_pitch];
            }
            epilogue.store(unit, i, row, low_sum * low_scale, high_sum * high_scale,
                           epilogue.prepare(unit, i, operands));
        }
        buffer ^= 1;
    }
#endif
}

// Whether the kernel supports this device and shape.
inline bool can_gemm_small_m_quant(const device::CudaStream &stream, int64_t m, int64_t k) {
    return has_bulk_copy(stream) && m >= 1 && m <= kQuantMaxM && k % 32 == 0;
}

template <typename T, QuantCodes Codes, typename Epilogue>
void run_gemm_small_m_quant(device::CudaStream &stream, const GemmInput &in, const QuantMatrix &w,
                            Epilogue epilogue) {
    constexpr bool kIsInt4 = Codes == QuantCodes::int4;
    epilogue.items = choose_unit_items(stream, epilogue.count());
    const int slice_shift = kIsInt4 ? 7 : 6;
    const int shift = std::min(group_shift(w.layout.group), slice_shift);
    const int64_t x_bytes =
        SmallRows::values_bytes(in.m, in.k) + SmallRows::scales_bytes(in.m, in.k, shift);
    const bool is_small = in.m == 1 || int64_t(in.m) * in.k <= kSmallOwnValues;
    const SmallX x = x_bytes > kQuantMaxKeptX ? SmallX::streamed
                     : is_small               ? SmallX::own
                                              : SmallX::kept;
    SmallRows rows{};
    if (x != SmallX::own) {
        rows = quantise_small_rows<T, Codes>(stream, in, shift);
    }
    const int n_units = int((epilogue.count() + epilogue.items - 1) / epilogue.items);
    const int rounds = (n_units + stream.n_sms - 1) / stream.n_sms;
    const int grid = (n_units + rounds - 1) / rounds;
    const SmallConfig shape = small_config(stream, in, w.layout, epilogue.items, rounds, x, shift);
    const auto kernel = gemm_small_m_quant_kernel<T, Codes, Epilogue>;
    set_max_dynamic_smem(kernel, size_t(stream.max_shared_bytes));
    launch(stream, kernel, unsigned(grid), kQuantThreads, shape.bytes, true, in, rows, w, epilogue,
           n_units, shape);
}

} // namespace llaisys::ops::cuda
