// GEMM for M 1 to 16 with quantised weights (ops/quant_rows.hpp) on compute capability 9,
// epilogues of gemm_epilogue.cuh. Bound: reading the weights once from DRAM.
//
// The structure of gemm_small_m_bulk.cuh: one block per SM, 16 consumer warps (with 8 the
// conversion is bound by its latency), 2 producer warps. A
// pipeline stage holds one segment of every weight row of a unit, one bulk copy per row with codes
// and parameters. A consumer warp takes every 16th slice of 64 values: 16 adjacent values per
// lane, converted to T in registers, then mma.sync. Row scales are applied to the sums.
//
// x is in shared memory for the whole launch (kept rows, or rows that every block normalizes), or
// streamed with the weights when it is too large.
//
// The bits of an output row depend on k only, not on m or n.
#pragma once

#include "ops/cuda/gemm_small_m_bulk_norm.cuh"
#include "ops/cuda/quant_decode.cuh"

namespace llaisys::ops::cuda {

constexpr int kQuantMaxM = kBulkMaxM;
constexpr int kQuantWarps = 16; // consumers
constexpr int kQuantConsumers = kQuantWarps * kWarpSize;
constexpr int kQuantBarrier = 8;          // of the consumers; norm_rows_to_smem uses lower ones
constexpr int kQuantSlice = 64;           // values of k per warp and step
constexpr int kQuantMaxKeptX = 132 << 10; // bytes of x in shared memory
constexpr int kQuantMinStages = 3;
constexpr int kQuantMaxStages = 16;

// Overrides for tuning runs; 0 selects the default.
struct QuantTuning {
    size_t smem_bytes = 0;     // of a block
    size_t prefetch_bytes = 0; // loaded before grid_dependency_wait()
};
constexpr size_t kQuantSmemBytes = 150 * 1000;
constexpr size_t kQuantPrefetchBytes = 64 << 10;

// Shared memory layout: stages, x, partial sums, scratch, mbarriers.
struct QuantConfig {
    int n_stages, prefetch_stages, segments, group_shift;
    uint32_t segment_bytes, last_segment_bytes, row_pitch, x_pitch;
    uint32_t stage_bytes, x_at, x_stride, sums_at, sums_pitch, scratch_at, barriers_at, bytes;
};

inline uint32_t quant_x_stride(int64_t k) { return uint32_t(k * 2 + 127) / 128 * 128 + 16; }

// Whether the rows of x stay in shared memory.
inline bool quant_keeps_x(int64_t m, int64_t k) { return m * quant_x_stride(k) <= kQuantMaxKeptX; }

inline QuantConfig quant_config(const device::CudaStream &stream, const GemmInput &in,
                                const QuantRowLayout &layout, int items, int most_units,
                                bool streams_x, const QuantTuning &tuning) {
    const int64_t segment = quant_segment(layout.codes);
    const auto m = uint32_t(in.m);
    QuantConfig s{};
    s.segments = int((in.k + segment - 1) / segment);
    s.group_shift = group_shift(layout.group);
    s.segment_bytes = uint32_t(layout.segment_bytes(std::min<int64_t>(segment, in.k)));
    s.last_segment_bytes = uint32_t(layout.segment_bytes(in.k - (s.segments - 1) * segment));
    // The 8-byte (int4) or 16-byte reads of the lanes hit different banks.
    s.row_pitch =
        (s.segment_bytes + 127) / 128 * 128 + (layout.codes == QuantCodes::int4 ? 32 : 64);
    s.x_pitch = uint32_t(segment) * 2 + 16;
    s.stage_bytes = 2 * uint32_t(items) * s.row_pitch + (streams_x ? m * s.x_pitch : 0);
    s.x_stride = quant_x_stride(in.k);
    const uint32_t x_bytes = streams_x ? 0 : m * s.x_stride;
    s.sums_pitch = m == 1 ? 1 : m + 1;
    const uint32_t sums_bytes = 2 * kQuantWarps * 16 * s.sums_pitch * 4;
    constexpr uint32_t kScratchBytes = 2 * kQuantWarps * 4 * 4;
    constexpr uint32_t kBarrierBytes = 2 * kQuantMaxStages * 8;
    const uint32_t rest = x_bytes + sums_bytes + kScratchBytes + kBarrierBytes + 32;
    const auto most = size_t(stream.max_shared_bytes);
    const size_t smem = tuning.smem_bytes > 0 ? tuning.smem_bytes : kQuantSmemBytes;
    const size_t prefetch = tuning.prefetch_bytes > 0 ? tuning.prefetch_bytes : kQuantPrefetchBytes;
    const auto stages_in = [&](size_t bytes) {
        return bytes > rest ? int((bytes - rest) / s.stage_bytes) : 0;
    };
    const int room = std::min(std::max(stages_in(smem), kQuantMinStages), stages_in(most));
    s.n_stages = std::max(1, std::min({room, most_units * s.segments, kQuantMaxStages}));
    s.prefetch_stages = std::clamp(int(prefetch / s.stage_bytes), 1, s.n_stages);
    s.x_at = uint32_t(s.n_stages) * s.stage_bytes;
    s.sums_at = s.x_at + x_bytes;
    s.scratch_at = s.sums_at + sums_bytes;
    s.barriers_at = (s.scratch_at + kScratchBytes + 15) / 16 * 16;
    // More than half: two blocks on one SM would leave another SM idle.
    s.bytes = std::max(s.barriers_at + kBarrierBytes, uint32_t(most / 2 + 1024));
    return s;
}

// Producer warp: fills every kBulkProducerWarps-th stage from stage `producer` on. Lanes 0 to 15
// copy the weight rows, the other lanes the rows of x.
template <typename T, QuantCodes Codes, bool StreamsX, typename Epilogue>
__device__ __forceinline__ void produce_quant_stages(const GemmInput &in, const QuantMatrix &w,
                                                     const Epilogue &epilogue, int own_units,
                                                     const QuantConfig &shape, uint32_t stages,
                                                     uint32_t full, uint32_t empty, int producer) {
    constexpr int kSegment = int(quant_segment(Codes));
    const int lane = threadIdx.x % kWarpSize;
    const int group = lane / 8;
    const int i = lane % 8;
    const int x_row = lane - 16;
    const bool is_x = StreamsX && x_row >= 0 && x_row < in.m;
    const bool is_weight = group < 2 && i < epilogue.items;
    const uint32_t to =
        stages + (is_x ? 2 * uint32_t(epilogue.items) * shape.row_pitch + x_row * shape.x_pitch
                       : uint32_t(group * epilogue.items + i) * shape.row_pitch);
    const uint64_t policy = is_x ? l2_evict_last_policy() : l2_evict_first_policy();
    const int total = own_units * shape.segments;
    const int n_early = min(shape.prefetch_stages, total); // at most n_stages
    const auto values_of = [&](int segment) { return min(kSegment, in.k - segment * kSegment); };
    const T *x = is_x ? static_cast<const T *>(in.x) + x_row * in.ldx : nullptr;
    const auto copy_x = [&](int segment, int stage) {
        cp_async_bulk(to + uint32_t(stage) * shape.stage_bytes, x + segment * kSegment,
                      uint32_t(values_of(segment)) * 2, full + uint32_t(stage) * 8, policy);
    };
    const auto copy_early_x = [&] { // rows of x for the prefetched stages
        grid_dependency_wait();
        for (int e = producer; is_x && e < n_early; e += kBulkProducerWarps) {
            copy_x(e % shape.segments, e);
        }
    };
    bool has_input = false;
    int unit_at = -1; // unit of `from`
    const unsigned char *from = nullptr;
    int stage = producer;
    uint32_t round = 0;
    for (int s = producer; s < total; s += kBulkProducerWarps) {
        if (s >= n_early && !has_input) {
            copy_early_x();
            has_input = true;
        }
        const int segment = s % shape.segments;
        if (is_weight && s / shape.segments != unit_at) {
            unit_at = s / shape.segments;
            const int64_t row =
                epilogue.row_index(int(blockIdx.x) + unit_at * int(gridDim.x), group, i);
            from = row >= 0 ? w.bytes + row * w.row_bytes : nullptr;
        }
        if (round > 0) {
            mbarrier_wait_parity(empty + uint32_t(stage) * 8, (round - 1) & 1);
        }
        const unsigned present = __ballot_sync(kFullMask, from != nullptr);
        const uint32_t bytes =
            segment + 1 == shape.segments ? shape.last_segment_bytes : shape.segment_bytes;
        if (lane == 0) {
            const uint32_t x_bytes = StreamsX ? uint32_t(in.m * values_of(segment)) * 2 : 0;
            mbarrier_arrive_expect_tx(full + uint32_t(stage) * 8,
                                      uint32_t(__popc(present)) * bytes + x_bytes);
        }
        __syncwarp();
        if (from != nullptr) {
            cp_async_bulk(to + uint32_t(stage) * shape.stage_bytes,
                          from + int64_t(segment) * shape.segment_bytes, bytes,
                          full + uint32_t(stage) * 8, policy);
        } else if (is_x && s >= n_early) {
            copy_x(segment, stage);
        }
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
template <typename T, QuantCodes Codes, bool StreamsX, int WarpsPerRow, typename Epilogue>
__global__ void __launch_bounds__(kQuantConsumers + kBulkProducerWarps * kWarpSize, 1)
    gemm_small_m_quant_kernel(GemmInput in, QuantMatrix w, Epilogue epilogue, int n_units,
                              QuantConfig shape) {
#if __CUDA_ARCH__ >= 900
    constexpr int kSegment = int(quant_segment(Codes));
    extern __shared__ __align__(1024) unsigned char shared[];
    const uint32_t full = smem_address(shared) + shape.barriers_at;
    const uint32_t empty = full + uint32_t(shape.n_stages) * 8;
    const int lane = threadIdx.x % kWarpSize;
    const int warp = threadIdx.x / kWarpSize;
    const int own_units = (n_units - int(blockIdx.x) + int(gridDim.x) - 1) / int(gridDim.x);

    launch_dependents();
    if (warp == kQuantWarps && lane == 0) {
        for (int stage = 0; stage < shape.n_stages; ++stage) {
            mbarrier_init(full + uint32_t(stage) * 8, 1);
            mbarrier_init(empty + uint32_t(stage) * 8, kQuantWarps);
        }
        fence_mbarrier_init();
    }
    if constexpr (WarpsPerRow > 0) {
        if (warp < kBulkConsumerWarps) {
            prefetch_norm_weight(in);
        }
    }
    __syncthreads(); // reached by all warps: the barrier is aligned
    if (warp >= kQuantWarps) {
        produce_quant_stages<T, Codes, StreamsX>(in, w, epilogue, own_units, shape,
                                                 smem_address(shared), full, empty,
                                                 warp - kQuantWarps);
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
            if constexpr (Codes == QuantCodes::int4) {
                low_scale = high_scale = 1 / kQuantFactor<T>;
            } else if constexpr (Codes == QuantCodes::f8) {
                low_scale = w.row_scale(max(int64_t(0), epilogue.row_index(unit, 0, i)));
                high_scale = w.row_scale(max(int64_t(0), epilogue.row_index(unit, 1, i)));
            }
        }
        float acc[2][2][4] = {}; // rows 0 to 7 and 8 to 15 of x, two chains each
        for (int segment = 0; segment < shape.segments; ++segment) {
            const int values = min(kSegment, in.k - segment * kSegment);
            mbarrier_wait_parity(full + uint32_t(stage) * 8, parity);
            const unsigned char *at = shared + uint32_t(stage) * shape.stage_bytes;
            const unsigned char *low = at + low_at, *high = at + high_at;
            const int codes = Codes == QuantCodes::int4 ? values / 2 : values; // bytes
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
                    const int byte = Codes == QuantCodes::int4 ? k / 2 : k;
                    low_bits = *reinterpret_cast<const QuantBits<Codes> *>(low + byte);
                    high_bits = *reinterpret_cast<const QuantBits<Codes> *>(high + byte);
                    const int group = k >> shape.group_shift;
                    low_params = load_params(low + codes, group, w.layout.param_bytes);
                    high_params = load_params(high + codes, group, w.layout.param_bytes);
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

// Whether the kernel supports this device and shape. keeps_x: x must stay in shared memory.
inline bool can_gemm_small_m_quant(const device::CudaStream &stream, int64_t m, int64_t k,
                                   bool norms, bool keeps_x) {
    return has_bulk_copy(stream) && m >= 1 && m <= kQuantMaxM && k % 32 == 0 &&
           (!keeps_x || quant_keeps_x(m, k)) && (!norms || k <= kBulkMaxNormK);
}

template <typename T, QuantCodes Codes, bool StreamsX, int WarpsPerRow, typename Epilogue>
void launch_gemm_small_m_quant(const device::CudaStream &stream, const GemmInput &in,
                               const QuantMatrix &w, const Epilogue &epilogue,
                               const QuantTuning &tuning) {
    const int n_units = int((epilogue.count() + epilogue.items - 1) / epilogue.items);
    const int rounds = (n_units + stream.n_sms - 1) / stream.n_sms;
    const int grid = (n_units + rounds - 1) / rounds;
    const QuantConfig shape =
        quant_config(stream, in, w.layout, epilogue.items, rounds, StreamsX, tuning);
    const auto kernel = gemm_small_m_quant_kernel<T, Codes, StreamsX, WarpsPerRow, Epilogue>;
    set_max_dynamic_smem(kernel, size_t(stream.max_shared_bytes));
    launch(stream, kernel, unsigned(grid), kQuantConsumers + kBulkProducerWarps * kWarpSize,
           shape.bytes, true, in, w, epilogue, n_units, shape);
}

// MayStream: rows of x that do not fit into shared memory are streamed.
template <typename T, QuantCodes Codes, bool MayStream, typename Epilogue>
void run_gemm_small_m_quant(const device::CudaStream &stream, const GemmInput &in,
                            const QuantMatrix &w, Epilogue epilogue,
                            const QuantTuning &tuning = {}) {
    epilogue.items = choose_unit_items(stream, epilogue.count());
    if (in.residual != nullptr) {
        launch_gemm_small_m_quant<T, Codes, false, 2>(stream, in, w, epilogue, tuning);
        return;
    }
    if constexpr (MayStream) {
        if (!quant_keeps_x(in.m, in.k)) {
            launch_gemm_small_m_quant<T, Codes, true, 0>(stream, in, w, epilogue, tuning);
            return;
        }
    }
    launch_gemm_small_m_quant<T, Codes, false, 0>(stream, in, w, epilogue, tuning);
}

} // namespace llaisys::ops::cuda
