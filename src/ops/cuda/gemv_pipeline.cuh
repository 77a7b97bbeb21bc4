// GEMV (M = 1) with cp.async.bulk on compute capability 9, epilogues of gemm_epilogue.cuh (units of
// one item): the kernel body of gemv_sm90.cuh and gemv_quant.cuh, which differ in their Product.
// Bound: reading the weights once from DRAM.
//
// One block per SM. Every warp has its own pipeline in shared memory: it issues bulk copies of the
// two weight rows of a unit (or blocks of them) and refills a stage as soon as it has read it, so
// that warps do not synchronize. Adjacent units of a block are distributed over its warps; with few
// units, `k_splits` warps share the rows of a unit. x is in shared memory; a fused norm applies
// 1 / rms to the sums. Reduction order: within a lane, a tree over the lanes, then the splits in
// order.
//
// All stages are loaded before grid_dependency_wait(). launch_dependents() is called when all but
// the last `late` copies are issued, so that DRAM always has requests in flight and consecutive
// kernels do not alternate. The shared memory request decides whether the next kernel's block
// fits on the SM, and whether two blocks of this kernel share an SM and leave another one idle.
//
// A Product counts k in steps: values, or segments of quantised rows.
//
//   Sums, float total(sums)               sums of a lane
//   const unsigned char *row(epilogue, unit, group)
//                                         address of a weight row
//   int64_t offset(begin)                 bytes from a row to step `begin`
//   uint32_t bytes(begin, count)          of `count` steps from `begin` on
//   void load_weights()                   loads of model constants for load_x(); legal before
//                                         grid_dependency_wait()
//   void load_x(shared, s)                x into shared memory by all threads; with a norm also the
//                                         sum of squares of each warp
//   bool norms()                          whether outputs are multiplied by 1 / rms
//   void add(low, high, shared, s, row, begin, end)
//                                         adds the products of a stage with the steps [begin, end),
//                                         which may be empty; row: the first row of the unit, the
//                                         second is row_pitch bytes further
#pragma once

#include "ops/cuda/gemm_epilogue.cuh"
#include "ops/cuda/mbarrier.cuh"

#include <algorithm>

namespace llaisys::ops::cuda {

constexpr int kGemvFewWarps = 8;        // lower bound per block
constexpr int kGemvManyWarps = 12;      // lower bound when there are that many units
constexpr int kGemvMaxWarps = 14;       // two such blocks leave 72 registers per thread
constexpr int kGemvMaxK = 32 << 10;     // values of x
constexpr int kGemvMaxSmem = 208 << 10; // bytes, stages and x
constexpr int kGemvLate = 1;

// Partition of the work, and shared memory layout: stages, x, sums, squares, mbarriers.
struct GemvConfig {
    int n_units, warps, k_splits;
    int split, block, blocks; // steps of a split and of a stage; stages of a split
    int stages, late;         // per warp; copies not yet issued at launch_dependents()
    uint32_t row_pitch;       // bytes of a row in a stage
    uint32_t x_at, sums_at, squares_at, barriers_at, bytes;

    // Chooses warps and k_splits with the least idle time of the warps. units: largest number per
    // block; cost(k_splits): time of a unit.
    template <typename Cost>
    void choose_partition(int units, int least_warps, int most_splits, const Cost &cost) {
        const int least = std::clamp(units, kGemvFewWarps, kGemvManyWarps);
        int64_t lowest = INT64_MAX;
        for (int n = std::max(least, least_warps); n <= kGemvMaxWarps; ++n) {
            for (int splits = 1; splits <= std::min(n, most_splits); ++splits) {
                const int at_once = n / splits; // units in parallel
                const int64_t all = (units + at_once - 1) / at_once * int64_t(cost(splits)) * n;
                if (n % splits == 0 && all < lowest) {
                    lowest = all;
                    warps = n;
                    k_splits = splits;
                }
            }
        }
    }
    // Stages that the busiest warp fills.
    int wanted_stages(int units) const {
        const int at_once = warps / k_splits;
        return (units + at_once - 1) / at_once * blocks;
    }
    void place_sums(uint32_t at, int units) {
        sums_at = at;
        squares_at = sums_at + uint32_t(2 * units * k_splits) * 4;
        barriers_at = (squares_at + uint32_t(warps) * 4 + 7) / 8 * 8;
        bytes = barriers_at + uint32_t(warps * stages) * 8;
    }
};

// One K split of the units first_unit, + at_once, ... of a block, which has own_units from `first`
// on. Computed by one warp.
struct GemvShare {
    int first, own_units;
    int at_once, first_unit, k_split;
    int begin, end;           // steps
    uint32_t buffer_at, full; // stages; mbarriers

    __device__ __forceinline__ GemvShare(const unsigned char *shared, const GemvConfig &s,
                                         int steps) {
        const int warp = threadIdx.x / kWarpSize;
        first = int(int64_t(blockIdx.x) * s.n_units / gridDim.x);
        own_units = int(int64_t(blockIdx.x + 1) * s.n_units / gridDim.x) - first;
        at_once = s.warps / s.k_splits;
        first_unit = warp / s.k_splits;
        k_split = warp - first_unit * s.k_splits;
        begin = k_split * s.split;
        end = min(begin + s.split, steps);
        buffer_at = uint32_t(warp * s.stages) * 2 * s.row_pitch;
        full = smem_address(shared) + s.barriers_at + uint32_t(warp * s.stages) * 8;
    }
};

// steps: of a row.
template <typename Product, typename Epilogue>
__device__ __forceinline__ void run_gemv(unsigned char *shared, const GemvConfig &s,
                                         const GemmInput &in, Product &product,
                                         const Epilogue &epilogue, int steps) {
    const int lane = threadIdx.x % kWarpSize;
    const GemvShare share(shared, s, steps);
    const int first = share.first;
    const int own_units = share.own_units;

    int left = // copies
        (max(0, own_units - share.first_unit) + share.at_once - 1) / share.at_once * s.blocks;
    if (left <= s.late) {
        launch_dependents();
    }
    // Next copy: lane 0 copies the first row of a unit, lane 1 the second.
    int fill_unit = share.first_unit, fill_begin = share.begin, fill_stage = 0;
    const unsigned char *row = nullptr;
    const uint64_t policy = l2_evict_first_policy();
    const uint32_t fill_to =
        smem_address(shared) + share.buffer_at + uint32_t(lane & 1) * s.row_pitch;
    const auto fill = [&] {
        if (left == 0) {
            return;
        }
        if (--left == s.late) {
            launch_dependents();
        }
        if (fill_begin == share.begin) {
            row = product.row(epilogue, first + fill_unit, lane & 1);
        }
        const int count = max(0, min(s.block, share.end - fill_begin));
        const uint32_t bytes = product.bytes(fill_begin, count);
        const uint32_t barrier = share.full + uint32_t(fill_stage) * 8;
        if (lane == 0) {
            mbarrier_arrive_expect_tx(barrier, 2 * bytes);
        }
        if (lane < 2 && bytes > 0) {
            cp_async_bulk(fill_to + uint32_t(fill_stage) * 2 * s.row_pitch,
                          row + product.offset(fill_begin), bytes, barrier, policy);
        }
        fill_stage = fill_stage + 1 == s.stages ? 0 : fill_stage + 1;
        fill_begin += s.block;
        if (fill_begin >= share.begin + s.blocks * s.block) {
            fill_begin = share.begin;
            fill_unit += share.at_once;
        }
    };
    if (lane == 0) {
        for (int stage = 0; stage < s.stages; ++stage) {
            mbarrier_init(share.full + uint32_t(stage) * 8, 1);
        }
        fence_mbarrier_init();
    }
    __syncwarp();
    for (int stage = 0; stage < s.stages; ++stage) {
        fill();
    }
    product.load_weights();
    // The unit whose result this thread stores; the last warps have the fewest units and store
    // first.
    const int own = int(blockDim.x - 1 - threadIdx.x);
    typename Epilogue::Operands operands{};
    if (own < own_units) {
        operands = epilogue.load_weights(first + own, 0);
    }
    grid_dependency_wait();
    product.load_x(shared, s);
    if (own < own_units) {
        epilogue.load_rows(first + own, 0, 0, &operands);
    }
    __syncthreads();

    auto *sums = reinterpret_cast<float *>(shared + s.sums_at);
    int stage = 0;
    uint32_t parity = 0;
    for (int unit = share.first_unit; unit < own_units; unit += share.at_once) {
        typename Product::Sums low{}, high{};
        for (int block = 0; block < s.blocks; ++block) {
            const int begin = share.begin + block * s.block;
            mbarrier_wait_parity(share.full + uint32_t(stage) * 8, parity);
            product.add(low, high, shared, s,
                        shared + share.buffer_at + uint32_t(stage) * 2 * s.row_pitch, begin,
                        min(begin + s.block, share.end));
            __syncwarp();
            fill();
            if (++stage == s.stages) {
                stage = 0;
                parity ^= 1;
            }
        }
        float low_sum = Product::total(low);
        float high_sum = Product::total(high);
#pragma unroll
        for (int step = 16; step > 0; step >>= 1) {
            low_sum += __shfl_xor_sync(kFullMask, low_sum, step);
            high_sum += __shfl_xor_sync(kFullMask, high_sum, step);
        }
        if (lane == 0) {
            sums[2 * unit * s.k_splits + share.k_split] = low_sum;
            sums[(2 * unit + 1) * s.k_splits + share.k_split] = high_sum;
        }
    }
    float factor = 1;
    typename Epilogue::Prepared prepared{};
    if (own < own_units) {
        if (product.norms()) {
            float squares = 0;
            for (int warp = 0; warp < s.warps; ++warp) {
                squares += reinterpret_cast<const float *>(shared + s.squares_at)[warp];
            }
            factor = 1.0f / sqrtf(squares / float(in.k) + in.epsilon);
        }
        prepared = epilogue.prepare(first + own, 0, operands);
    }
    __syncthreads();
    for (int u = own; u < own_units; u += int(blockDim.x)) {
        if (u != own) {
            prepared = epilogue.prepare(first + u, 0, load_operands(epilogue, first + u, 0, 0));
        }
        float low = 0;
        float high = 0;
        for (int i = 0; i < s.k_splits; ++i) {
            low += sums[2 * u * s.k_splits + i];
            high += sums[(2 * u + 1) * s.k_splits + i];
        }
        epilogue.store(first + u, 0, 0, low * factor, high * factor, prepared);
    }
}

// Sum of squares of this warp's values, for the norm.
__device__ __forceinline__ void store_squares(unsigned char *shared, const GemvConfig &s,
                                              float squares) {
    squares = warp_sum(squares);
    if (threadIdx.x % kWarpSize == 0) {
        reinterpret_cast<float *>(shared + s.squares_at)[threadIdx.x / kWarpSize] = squares;
    }
}

// kernel(arguments..., epilogue, shape).
template <typename Kernel, typename Epilogue, typename Config, typename... Arguments>
void launch_gemv(const device::CudaStream &stream, Kernel kernel, int grid,
                 const Epilogue &epilogue, const Config &shape, const Arguments &...arguments) {
    set_max_dynamic_smem(kernel,
                         size_t(stream.max_shared_bytes)); // the largest config of any launch
    launch(stream, kernel, unsigned(grid), unsigned(shape.warps * kWarpSize), shape.bytes, true,
           arguments..., epilogue, shape);
}

} // namespace llaisys::ops::cuda
