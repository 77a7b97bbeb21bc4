// GEMM for M 1 to 16 with f8 weights (ops/quant_rows.hpp) on compute capability 9, epilogues of
// gemm_epilogue.cuh, for activations and streams that gemm_tma_quant.cuh does not support. Bound:
// the conversion in registers.
//
// The pipeline of gemm_small_m_stages.cuh. A consumer warp takes every 16th slice of 64 values: 16
// adjacent values per lane, converted to T in registers, then mma.sync. Row scales are applied to
// the sums.
//
// x is in shared memory for the whole launch (kept rows, or rows that every block normalizes), or
// streamed with the weights when it is too large.
//
// The bits of an output row depend on k only, not on m or n.
#pragma once

#include "ops/cuda/gemm_small_m_bulk_norm.cuh"
#include "ops/cuda/gemm_small_m_int.cuh"
#include "ops/cuda/gemm_small_m_stages.cuh"

namespace llaisys::ops::cuda {

constexpr int kQuantSlice = 64; // values of k per warp and step

// scratch: of norm_rows_to_smem.
struct QuantConfig : QuantStages {
    int group_shift;
    uint32_t x_pitch, x_stride;
};

inline uint32_t quant_x_stride(int64_t k) { return uint32_t(k * 2 + 127) / 128 * 128 + 16; }

// Whether the rows of x stay in shared memory.
inline bool quant_keeps_x(int64_t m, int64_t k) { return m * quant_x_stride(k) <= kQuantMaxKeptX; }

inline QuantConfig quant_config(const device::CudaStream &stream, const GemmInput &in,
                                const QuantRowLayout &layout, int items, int most_units,
                                bool streams_x, const QuantTuning &tuning) {
    QuantConfig s{};
    s.group_shift = group_shift(layout.group);
    s.x_pitch = uint32_t(quant_segment(layout.codes)) * 2 + 16;
    s.x_stride = quant_x_stride(in.k);
    const auto m = uint32_t(in.m);
    set_quant_stages(s, stream, in, layout, items, most_units, 64, streams_x ? m * s.x_pitch : 0,
                     streams_x ? 0 : m * s.x_stride, 2 * kQuantWarps * 4 * 4, tuning);
    return s;
}

// Lanes 16 to 31 of a producer warp copy the rows of a streamed x.
template <typename T> struct StreamedX {
    static constexpr int kSegment = int(quant_segment(QuantCodes::f8));
    const GemmInput &in;
    uint32_t pitch;

    __device__ __forceinline__ uint32_t row_bytes(int segment) const {
        return uint32_t(min(kSegment, in.k - segment * kSegment)) * 2;
    }
    __device__ __forceinline__ uint32_t bytes(int segment) const {
        return uint32_t(in.m) * row_bytes(segment);
    }
    __device__ __forceinline__ void copy(int segment, uint32_t to, uint32_t barrier) const {
        const int row = int(threadIdx.x) % kWarpSize - 16;
        if (row < in.m) {
            cp_async_bulk(to + uint32_t(row) * pitch,
                          static_cast<const T *>(in.x) + row * in.ldx + segment * kSegment,
                          row_bytes(segment), barrier, l2_evict_last_policy());
        }
    }
};

// Copies the rows of x, 16-bit, into shared memory; by the consumer threads.
inline __device__ void keep_rows(unsigned char *to, uint32_t stride, const GemmInput &in) {
    const int vectors = in.k / 8;
    for (int row = 0; row < in.m; ++row) {
        const auto *from = reinterpret_cast<const uint4 *>(
            static_cast<const unsigned char *>(in.x) + int64_t(row) * in.ldx * 2);
        auto *to_row = reinterpret_cast<uint4 *>(to + uint32_t(row) * stride);
#pragma unroll 4
        for (int at = threadIdx.x; at < vectors; at += kQuantConsumers) {
            to_row[at] = from[at];
        }
    }
    named_barrier_sync<kQuantBarrier, kQuantConsumers>();
}

// WarpsPerRow: warps that normalize one row; 0: x is 16-bit.
template <typename T, bool StreamsX, int WarpsPerRow, typename Epilogue>
__global__ void __launch_bounds__(kQuantThreads, 1)
    gemm_small_m_quant_kernel(GemmInput in, QuantMatrix w, Epilogue epilogue, int n_units,
                              QuantConfig shape) {
#if __CUDA_ARCH__ >= 900
    constexpr QuantCodes Codes = QuantCodes::f8;
    constexpr int kSegment = int(quant_segment(Codes));
    extern __shared__ __align__(1024) unsigned char shared[];
    const uint32_t full = smem_address(shared) + shape.barriers_at;
    const uint32_t empty = full + uint32_t(shape.n_stages) * 8;
    const int lane = threadIdx.x % kWarpSize;
    const int warp = threadIdx.x / kWarpSize;
    const int own_units = (n_units - int(blockIdx.x) + int(gridDim.x) - 1) / int(gridDim.x);

    launch_dependents();
    if (warp == kQuantWarps && lane == 0) {
        init_quant_barriers(shape, full, empty);
        fence_mbarrier_init();
    }
    if constexpr (WarpsPerRow > 0) {
        if (warp < kBulkConsumerWarps) {
            prefetch_norm_weight(in);
        }
    }
    __syncthreads(); // reached by all warps: the barrier is aligned
    if (warp >= kQuantWarps) {
        const auto produce = [&](const auto &x) {
            produce_quant_stages(w, epilogue, x, own_units, shape, smem_address(shared), full,
                                 empty, warp - kQuantWarps);
        };
        if constexpr (StreamsX) {
            produce(StreamedX<T>{in, shape.x_pitch});
        } else {
            produce(NoStreamedX{});
        }
        return;
    }
    grid_dependency_wait();
    if constexpr (WarpsPerRow > 0) {
        if (warp < kBulkConsumerWarps) {
            norm_rows_to_smem<T, WarpsPerRow>(shared + shape.x_at, shape.x_stride, in,
                                              reinterpret_cast<float *>(shared + shape.scratch_at));
        }
        named_barrier_sync<kQuantBarrier, kQuantConsumers>();
    } else if constexpr (!StreamsX) {
        keep_rows(shared + shape.x_at, shape.x_stride, in);
    }

    const int g = lane / 4;
    const int own_k = lane % 4 * 16; // within a slice
    // A unit may have fewer rows than the group: read another row, its sums are dropped.
    const uint32_t low_at = uint32_t(min(g, epilogue.items - 1)) * shape.row_pitch;
    const uint32_t high_at = low_at + uint32_t(epilogue.items) * shape.row_pitch;
    const bool stores = threadIdx.x < 8 * in.m;
    auto *sums = reinterpret_cast<float *>(shared + shape.sums_at);
    int stage = 0;
    uint32_t parity = 0;
    int buffer = 0;
    for (int unit = blockIdx.x; unit < n_units; unit += gridDim.x) {
        typename Epilogue::Operands operands{};
        float low_scale = 1, high_scale = 1;
        if (stores) {
            const int i = threadIdx.x % 8;
            operands = load_operands(epilogue, unit, i, threadIdx.x / 8);
            low_scale = w.row_scale(max(int64_t(0), epilogue.row_index(unit, 0, i)));
            high_scale = w.row_scale(max(int64_t(0), epilogue.row_index(unit, 1, i)));
        }
        float acc[2][2][4] = {}; // rows 0 to 7 and 8 to 15 of x, two chains each
        for (int segment = 0; segment < shape.segments; ++segment) {
            const int values = min(kSegment, in.k - segment * kSegment);
            mbarrier_wait_parity(full + uint32_t(stage) * 8, parity);
            const unsigned char *at = shared + uint32_t(stage) * shape.stage_bytes;
            const unsigned char *low = at + low_at, *high = at + high_at;
            const unsigned char *x_rows =
                StreamsX ? at + 2 * uint32_t(epilogue.items) * shape.row_pitch
                         : shared + shape.x_at + uint32_t(segment) * kSegment * 2;
            const uint32_t x_stride = StreamsX ? shape.x_pitch : shape.x_stride;
#pragma unroll 2
            for (int k = warp * kQuantSlice + own_k; k - own_k < values;
                 k += kQuantWarps * kQuantSlice) {
                const bool is_inside = k < values;
                QuantBits<Codes> low_bits{}, high_bits{};
                QuantParams low_params{}, high_params{};
                if (is_inside) {
                    low_bits = *reinterpret_cast<const QuantBits<Codes> *>(low + k);
                    high_bits = *reinterpret_cast<const QuantBits<Codes> *>(high + k);
                    const int group = k >> shape.group_shift;
                    low_params = load_params(low + values, group, w.layout.param_bytes);
                    high_params = load_params(high + values, group, w.layout.param_bytes);
                }
                uint32_t low_pairs[8], high_pairs[8];
                decode_16<T, Codes>(low_bits, low_params, low_pairs);
                decode_16<T, Codes>(high_bits, high_params, high_pairs);
#pragma unroll
                for (int tile = 0; tile < 2; ++tile) {
                    if (tile * 8 >= in.m) {
                        break;
                    }
                    const int row = tile * 8 + g;
                    uint4 x0{}, x1{};
                    if (is_inside && row < in.m) {
                        const auto *from = reinterpret_cast<const uint4 *>(
                            x_rows + uint32_t(row) * x_stride + k * 2);
                        x0 = from[0];
                        x1 = from[1];
                    }
                    const uint32_t b[8] = {x0.x, x0.y, x0.z, x0.w, x1.x, x1.y, x1.z, x1.w};
#pragma unroll
                    for (int step = 0; step < 4; ++step) {
                        const uint32_t a[4] = {low_pairs[2 * step], high_pairs[2 * step],
                                               low_pairs[2 * step + 1], high_pairs[2 * step + 1]};
                        mma_m16n8k16<T>(acc[tile][step & 1], a, b[2 * step], b[2 * step + 1]);
                    }
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
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            const int tile = i / 4;
            const int c = i % 4;
            const int column = tile * 8 + lane % 4 * 2 + (c & 1);
            if (column < in.m) {
                sums[((buffer * kQuantWarps + warp) * 16 + g + (c >> 1) * 8) * shape.sums_pitch +
                     column] = acc[tile][0][c] + acc[tile][1][c];
            }
        }
        // The double buffer of the next but one unit is free when all warps arrive here again.
        named_barrier_sync<kQuantBarrier, kQuantConsumers>();
        if (stores) {
            store_quant_unit(epilogue, unit, sums, shape.sums_pitch, buffer, low_scale, high_scale,
                             operands);
        }
        buffer ^= 1;
    }
#endif
}

// Whether the kernels support this device and shape. keeps_x: f8 rows of x must stay in shared
// memory.
inline bool can_gemm_small_m_quant(const device::CudaStream &stream, QuantCodes codes, int64_t m,
                                   int64_t k, bool norms, bool keeps_x) {
    return has_bulk_copy(stream) && m >= 1 && m <= kQuantMaxM && k % 32 == 0 &&
           (codes != QuantCodes::f8 ||
            ((!keeps_x || quant_keeps_x(m, k)) && (!norms || k <= kBulkMaxNormK)));
}

template <typename T, bool StreamsX, int WarpsPerRow, typename Epilogue>
void launch_gemm_small_m_quant(const device::CudaStream &stream, const GemmInput &in,
                               const QuantMatrix &w, const Epilogue &epilogue,
                               const QuantTuning &tuning) {
    const int n_units = int((epilogue.count() + epilogue.items - 1) / epilogue.items);
    const int rounds = (n_units + stream.n_sms - 1) / stream.n_sms;
    const int grid = (n_units + rounds - 1) / rounds;
    const QuantConfig shape =
        quant_config(stream, in, w.layout, epilogue.items, rounds, StreamsX, tuning);
    const auto kernel = gemm_small_m_quant_kernel<T, StreamsX, WarpsPerRow, Epilogue>;
    set_max_dynamic_smem(kernel, size_t(stream.max_shared_bytes));
    launch(stream, kernel, unsigned(grid), kQuantThreads, shape.bytes, true, in, w, epilogue,
           n_units, shape);
}

// MayStream: rows of x that do not fit into shared memory are streamed.
template <typename T, QuantCodes Codes, bool MayStream, typename Epilogue>
void run_gemm_small_m_quant(device::CudaStream &stream, const GemmInput &in, const QuantMatrix &w,
                            Epilogue epilogue, const QuantTuning &tuning = {}) {
    if constexpr (Codes != QuantCodes::f8) {
        run_gemm_small_m_int<T, Codes>(stream, in, w, epilogue, tuning);
    } else {
        epilogue.items = choose_unit_items(stream, epilogue.count());
        if (in.residual != nullptr) {
            launch_gemm_small_m_quant<T, false, 2>(stream, in, w, epilogue, tuning);
            return;
        }
        if constexpr (MayStream) {
            if (!quant_keeps_x(in.m, in.k)) {
                launch_gemm_small_m_quant<T, true, 0>(stream, in, w, epilogue, tuning);
                return;
            }
        }
        launch_gemm_small_m_quant<T, false, 0>(stream, in, w, epilogue, tuning);
    }
}

} // namespace llaisys::ops::cuda
