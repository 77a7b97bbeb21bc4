// GEMM for M 1 to 16 with cp.async.bulk and mma.sync on compute capability 9, epilogues of
// gemm_epilogue.cuh. Bound: reading the weights once from DRAM.
//
// One block per SM: 8 consumer warps and 2 producer warps. A pipeline stage holds 512 values of k
// of every weight row of a unit, one bulk copy of 1 KB per row with an L2 evict-first policy, and
// the same 512 values of the rows of x when x is 16-bit. A full and an empty mbarrier guard each
// stage. One producer warp issues copies too slowly (74 % of the bandwidth); two alternate over
// the stages; four are slower again. Rows are 1,088 bytes apart so that the 8 lanes of a 16-byte
// read hit different banks. Each warp takes 64 of the 512 values; k is permuted identically in
// both operands (16 bytes per lane). Reduction order: two chains per warp, then the warps in
// order through shared memory. f32 rows are normalized into shared memory by every block
// (gemm_small_m_bulk_norm.cuh).
//
// `prefetch_bytes` of weights are loaded before grid_dependency_wait(); more would compete with
// the copies of the previous kernel (gemm_small_m_bulk_config.cuh). The bits of an output row
// depend on k only, not on m or n.
#pragma once

#include "ops/cuda/gemm_small_m_bulk_norm.cuh"

namespace llaisys::ops::cuda {

// Producer warp: fills every kBulkProducerWarps-th stage from stage `producer` on. Lanes 0 to 15
// copy the weight rows, the other lanes the rows of x.
template <typename T, bool StreamsX, typename Epilogue>
__device__ __forceinline__ void produce_bulk_stages(const GemmInput &in, const Epilogue &epilogue,
                                                    int own_units, const BulkConfig &shape,
                                                    uint32_t stages, uint32_t full, uint32_t empty,
                                                    int producer) {
    const int lane = threadIdx.x % kWarpSize;
    const int group = lane / 8;
    const int i = lane % 8;
    const int x_row = lane - 16;
    const bool is_x = StreamsX && x_row >= 0 && x_row < in.m;
    const bool is_weight = group < 2 && i < epilogue.items;
    const uint32_t to =
        stages +
        uint32_t(is_x ? 2 * epilogue.items + x_row : group * epilogue.items + i) * kBulkRowPitch;
    const uint64_t policy = is_x ? l2_evict_last_policy() : l2_evict_first_policy();
    const int chunks = (in.k + kBulkStageK - 1) / kBulkStageK;
    const int total = own_units * chunks;
    const int n_early = min(shape.prefetch_stages, total); // at most n_stages
    const auto copy = [&](const T *from, int chunk, int stage) {
        const int first = chunk * kBulkStageK;
        cp_async_bulk(to + uint32_t(stage) * shape.stage_bytes, from + first,
                      uint32_t(min(kBulkStageK, in.k - first)) * 2, full + uint32_t(stage) * 8,
                      policy);
    };
    const T *x = is_x ? static_cast<const T *>(in.x) + x_row * in.ldx : nullptr;
    const auto copy_early_x = [&] { // rows of x for the prefetched stages
        grid_dependency_wait();
        for (int e = producer; is_x && e < n_early; e += kBulkProducerWarps) {
            copy(x, e % chunks, e);
        }
    };
    bool has_input = false;
    int unit_at = -1; // unit of `from`
    const T *from = x;
    int stage = producer;
    uint32_t round = 0;
    for (int s = producer; s < total; s += kBulkProducerWarps) {
        if (s >= n_early && !has_input) {
            copy_early_x();
            has_input = true;
        }
        const int chunk = s % chunks;
        if (is_weight && s / chunks != unit_at) {
            unit_at = s / chunks;
            from = epilogue.row(int(blockIdx.x) + unit_at * int(gridDim.x), group, i);
        }
        if (round > 0) {
            mbarrier_wait_parity(empty + uint32_t(stage) * 8, (round - 1) & 1);
        }
        const unsigned present = __ballot_sync(kFullMask, from != nullptr);
        if (lane == 0) {
            const int values = min(kBulkStageK, in.k - chunk * kBulkStageK);
            mbarrier_arrive_expect_tx(full + uint32_t(stage) * 8,
                                      uint32_t(__popc(present) * values) * 2);
        }
        __syncwarp();
        if (from != nullptr && (!is_x || s >= n_early)) {
            copy(from, chunk, stage);
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

// WarpsPerRow: warps that normalize one row; 0: x is 16-bit.
template <typename T, int WarpsPerRow, typename Epilogue>
__global__ void __launch_bounds__(kBulkConsumerThreads + kBulkProducerWarps * kWarpSize, 2)
    gemm_small_m_bulk_kernel(GemmInput in, Epilogue epilogue, int n_units, BulkConfig shape) {
#if __CUDA_ARCH__ >= 900
    constexpr bool kStreamsX = WarpsPerRow == 0;
    extern __shared__ __align__(128) unsigned char shared[];
    const uint32_t full = smem_address(shared) + shape.barriers_at;
    const uint32_t empty = full + uint32_t(shape.n_stages) * 8;
    const int lane = threadIdx.x % kWarpSize;
    const int warp = threadIdx.x / kWarpSize;
    const int own_units = (n_units - int(blockIdx.x) + int(gridDim.x) - 1) / int(gridDim.x);

    launch_dependents();
    if (warp == kBulkConsumerWarps && lane == 0) {
        for (int stage = 0; stage < shape.n_stages; ++stage) {
            mbarrier_init(full + uint32_t(stage) * 8, 1);
            mbarrier_init(empty + uint32_t(stage) * 8, kBulkConsumerWarps);
        }
        fence_mbarrier_init();
    }
    if constexpr (!kStreamsX) {
        prefetch_norm_weight(in);
    }
    __syncthreads(); // reached by all warps: the barrier is aligned
    if (warp >= kBulkConsumerWarps) {
        produce_bulk_stages<T, kStreamsX>(in, epilogue, own_units, shape, smem_address(shared),
                                          full, empty, warp - kBulkConsumerWarps);
        return;
    }
    const unsigned char *rows_of_x = shared + shape.x_at;
    grid_dependency_wait();
    if constexpr (!kStreamsX) {
        norm_rows_to_smem<T, WarpsPerRow>(shared + shape.x_at, shape.x_stride, in,
                                          reinterpret_cast<float *>(shared + shape.scratch_at));
    }

    const int chunks = (in.k + kBulkStageK - 1) / kBulkStageK;
    const int g = lane / 4;
    const int own_k = warp * kBulkWarpK + lane % 4 * 8; // within a stage
    // A unit may have fewer rows than the group: read another row, its sums are dropped.
    const uint32_t low_at = uint32_t(min(g, epilogue.items - 1)) * kBulkRowPitch;
    const uint32_t high_at = low_at + uint32_t(epilogue.items) * kBulkRowPitch;
    const bool stores = threadIdx.x < 8 * in.m;
    auto *sums = reinterpret_cast<float *>(shared + shape.sums_at);
    int stage = 0;
    uint32_t parity = 0;
    int buffer = 0;
    for (int unit = blockIdx.x; unit < n_units; unit += gridDim.x) {
        typename Epilogue::Operands operands{};
        if (stores) {
            operands = load_operands(epilogue, unit, threadIdx.x % 8, threadIdx.x / 8);
        }
        float acc[2][2][4] = {}; // rows 0 to 7 and 8 to 15 of x, two chains each
        for (int chunk = 0; chunk < chunks; ++chunk) {
            mbarrier_wait_parity(full + uint32_t(stage) * 8, parity);
            const unsigned char *at = shared + uint32_t(stage) * shape.stage_bytes;
#pragma unroll
            for (int step = 0; step < kBulkWarpK / 32; ++step) {
                const int k = own_k + step * 32;
                const bool is_inside = chunk * kBulkStageK + k < in.k;
                uint4 low{}, high{};
                if (is_inside) {
                    low = *reinterpret_cast<const uint4 *>(at + low_at + k * 2);
                    high = *reinterpret_cast<const uint4 *>(at + high_at + k * 2);
                }
                const uint32_t a0[4] = {low.x, high.x, low.y, high.y};
                const uint32_t a1[4] = {low.z, high.z, low.w, high.w};
#pragma unroll
                for (int tile = 0; tile < 2; ++tile) {
                    if (tile * 8 >= in.m) {
                        break;
                    }
                    const int row = tile * 8 + g;
                    uint4 x{};
                    if (is_inside && row < in.m) {
                        const unsigned char *from =
                            kStreamsX
                                ? at + uint32_t(2 * epilogue.items + row) * kBulkRowPitch + k * 2
                                : rows_of_x + uint32_t(row) * shape.x_stride +
                                      (chunk * kBulkStageK + k) * 2;
                        x = *reinterpret_cast<const uint4 *>(from);
                    }
                    mma_m16n8k16<T>(acc[tile][step & 1], a0, x.x, x.y);
                    mma_m16n8k16<T>(acc[tile][step & 1], a1, x.z, x.w);
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
                sums[((buffer * kBulkConsumerWarps + warp) * 16 + g + (c >> 1) * 8) *
                         shape.sums_pitch +
                     column] = acc[tile][0][c] + acc[tile][1][c];
            }
        }
        // The double buffer of the next but one unit is free when all warps arrive here again.
        named_barrier_sync<1, kBulkConsumerThreads>();
        if (stores) {
            const int i = threadIdx.x % 8;
            const int row = threadIdx.x / 8;
            float low = 0;
            float high = 0;
#pragma unroll
            for (int w = 0; w < kBulkConsumerWarps; ++w) {
                const float *of_warp =
                    sums + ((buffer * kBulkConsumerWarps + w) * 16 + i) * shape.sums_pitch + row;
                low += of_warp[0];
                high += of_warp[8 * shape.sums_pitch];
            }
            epilogue.store(unit, i, row, low, high, epilogue.prepare(unit, i, operands));
        }
        buffer ^= 1;
    }
#endif
}

// Whether the kernel supports this device and shape; K of a fused norm is limited.
inline bool can_gemm_small_m_bulk(const device::CudaStream &stream, int64_t m, int64_t k,
                                  bool norms) {
    return has_bulk_copy(stream) && m >= 1 && m <= kBulkMaxM && k % 8 == 0 &&
           (!norms || k <= kBulkMaxNormK);
}

template <typename T, int WarpsPerRow, typename Epilogue>
void launch_gemm_small_m_bulk(const device::CudaStream &stream, const GemmInput &in,
                              const Epilogue &epilogue, const BulkTuning &tuning) {
    const int n_units = int((epilogue.count() + epilogue.items - 1) / epilogue.items);
    const int rounds = (n_units + stream.n_sms - 1) / stream.n_sms;
    const int grid = (n_units + rounds - 1) / rounds;
    const BulkConfig shape =
        bulk_config(in, epilogue.items, rounds, size_t(stream.max_shared_bytes) / 2 + 1024, tuning);
    const auto kernel = gemm_small_m_bulk_kernel<T, WarpsPerRow, Epilogue>;
    set_max_dynamic_smem(kernel,
                         size_t(stream.max_shared_bytes)); // the largest config of any launch
    launch(stream, kernel, unsigned(grid), kBulkConsumerThreads + kBulkProducerWarps * kWarpSize,
           shape.bytes, true, in, epilogue, n_units, shape);
}

template <typename T, typename Epilogue>
void run_gemm_small_m_bulk(const device::CudaStream &stream, const GemmInput &in,
                           const Epilogue &epilogue, const BulkTuning &tuning = {}) {
    if (in.residual == nullptr) {
        launch_gemm_small_m_bulk<T, 0>(stream, in, epilogue, tuning);
    } else if (in.k <= kBulkNormK) {
        launch_gemm_small_m_bulk<T, 1>(stream, in, epilogue, tuning);
    } else {
        launch_gemm_small_m_bulk<T, 2>(stream, in, epilogue, tuning);
    }
}

} // namespace llaisys::ops::cuda
