// GEMV (M = 1) with cp.async.bulk on compute capability 9, epilogues of gemm_epilogue.cuh (units
// of one item). Bound: reading the weights once from DRAM.
//
// One block per SM. Every warp has its own pipeline in shared memory: it issues bulk copies of
// the two weight rows of a unit (or K blocks of them, 1 to 4 KB) and refills a stage as soon as
// it has read it, so that warps do not synchronize. Adjacent units of a block are distributed
// over its warps; with few units, `k_splits` warps share the rows of a unit. x is in shared
// memory: unchanged, or for a fused norm as f32 times the norm weight, with 1 / rms applied to
// the sums. Reduction order: four chains per lane, a tree over the lanes, then the splits in
// order.
//
// All stages are loaded before grid_dependency_wait(). launch_dependents() is called when all but
// the last `late` copies are issued, so that DRAM always has requests in flight and consecutive
// kernels do not alternate. The shared memory request decides whether the next kernel's block
// fits on the SM, and whether two blocks of this kernel share an SM and leave another one idle.
#pragma once

#include "ops/cuda/gemm_epilogue.cuh"
#include "ops/cuda/mbarrier.cuh"

#include <algorithm>

namespace llaisys::ops::cuda {

constexpr int kGemvFewWarps = 8;    // lower bound per block
constexpr int kGemvManyWarps = 12;  // lower bound when there are that many units
constexpr int kGemvMaxWarps = 14;   // two such blocks leave 72 registers per thread
constexpr int kGemvNormVectors = 4; // float4 values per thread of a normalized row
constexpr int kGemvMaxK = 32 << 10; // values of x

// Overrides for tuning runs; 0 selects the default.
struct GemvTuning {
    int warps = 0;
    int k_splits = 0; // divides warps
    int k_block = 0;  // largest number of values per stage
    int stages = 0;   // per warp
    int late = 0;     // copies not yet issued when launch_dependents() is called
};
// Blocks use the large buffer if they fuse the norm and read many weights, or if K is long.
constexpr int64_t kGemvLargeBlockBytes = 400 * 1000; // weights per block
constexpr int kGemvLongK = 4096;                     // values of x
constexpr int kGemvLargeBufferBytes = 168 << 10;     // bytes
constexpr int kGemvBufferBytes = 84 << 10;           // bytes
constexpr int kGemvMaxSmem = 208 << 10;              // bytes, stages and x
constexpr int kGemvLate = 1;

// Partition of the work, and shared memory layout: stages, x, sums, squares, mbarriers.
struct GemvConfig {
    int n_units, warps, k_splits, k_split, k_block, k_blocks, stages, late;
    uint32_t x_at, sums_at, squares_at, barriers_at, bytes;
};

struct GemvPartition {
    int warps, k_splits;
};
// Minimizes the idle time of the warps; the end of a split counts as 64 values.
inline GemvPartition gemv_partition(int units, int k, bool norms) {
    // enough warps to hold x
    const int holding = norms ? (k - 1) / (kWarpSize * 4 * kGemvNormVectors) + 1 : 1;
    const int least = std::clamp(units, kGemvFewWarps, kGemvManyWarps);
    GemvPartition best{};
    int64_t lowest = INT64_MAX;
    for (int warps = std::max(least, holding); warps <= kGemvMaxWarps; ++warps) {
        for (int k_splits = 1; k_splits <= warps; ++k_splits) {
            const int at_once = warps / k_splits; // units in parallel
            const int64_t rounds = (units + at_once - 1) / at_once;
            const int64_t cost = rounds * (k / k_splits + 64) * warps;
            if (warps % k_splits == 0 && cost < lowest) {
                lowest = cost;
                best = {warps, k_splits};
            }
        }
    }
    return best;
}

inline GemvConfig gemv_config(const GemmInput &in, int n_units, int grid,
                              const GemvTuning &tuning) {
    constexpr int kLine = 64; // values per 128-byte line
    const bool norms = in.residual != nullptr;
    const int units = (n_units + grid - 1) / grid; // largest per block
    const GemvPartition partition = gemv_partition(units, in.k, norms);
    const bool has_long_rows = !norms && in.k > kGemvLongK;
    const bool is_long =
        has_long_rows || (norms && int64_t(units) * in.k * 4 > kGemvLargeBlockBytes);
    const int x_bytes = in.k * (norms ? 4 : 2);
    const auto choose = [](int tuned, int usual) { return tuned > 0 ? tuned : usual; };
    GemvConfig s{};
    s.n_units = n_units;
    s.warps = choose(tuning.warps, partition.warps);
    s.k_splits = choose(tuning.k_splits, partition.k_splits);
    s.k_split = (in.k + s.k_splits * 8 - 1) / (s.k_splits * 8) * 8;
    const int buffer =
        std::min(is_long ? kGemvLargeBufferBytes : kGemvBufferBytes, kGemvMaxSmem - x_bytes);
    const int stages = choose(tuning.stages, has_long_rows ? 3 : 2);
    const int most = choose(tuning.k_block, buffer / (stages * 4 * s.warps) / kLine * kLine);
    s.k_blocks = (s.k_split + most - 1) / most;
    s.k_block = (s.k_split + s.k_blocks * kLine - 1) / (s.k_blocks * kLine) * kLine;
    const int at_once = s.warps / s.k_splits;
    const int wanted = (units + at_once - 1) / at_once * s.k_blocks;
    s.stages = std::min(stages, wanted);
    s.late = choose(tuning.late, kGemvLate);
    s.x_at = (uint32_t(s.warps * s.stages * s.k_block) * 4 + 127) / 128 * 128;
    s.sums_at = s.x_at + (uint32_t(x_bytes) + 15) / 16 * 16;
    s.squares_at = s.sums_at + uint32_t(2 * units * s.k_splits) * 4;
    s.barriers_at = (s.squares_at + uint32_t(s.warps) * 4 + 7) / 8 * 8;
    s.bytes = s.barriers_at + uint32_t(s.warps * s.stages) * 8;
    return s;
}

// Two adjacent values.
template <typename T> __device__ __forceinline__ float2 unpack_pair(uint32_t bits);
template <> __device__ __forceinline__ float2 unpack_pair<bf16>(uint32_t bits) {
    return make_float2(__uint_as_float(bits << 16), __uint_as_float(bits & 0xffff0000u));
}
template <> __device__ __forceinline__ float2 unpack_pair<f16>(uint32_t bits) {
    return __half22float2(*reinterpret_cast<const __half2 *>(&bits));
}

struct XVector { // 8 values of x
    float4 low, high;
};
// Values 8 i to 8 i + 7 of the row stored by load_x.
template <typename T, bool Norms>
__device__ __forceinline__ XVector load_x_vector(const unsigned char *row, int i, int k) {
    if constexpr (Norms) {
        const auto *x = reinterpret_cast<const float4 *>(row);
        return {x[i], x[k / 8 + i]};
    } else {
        const uint4 x = reinterpret_cast<const uint4 *>(row)[i];
        const float2 a = unpack_pair<T>(x.x), b = unpack_pair<T>(x.y);
        const float2 c = unpack_pair<T>(x.z), d = unpack_pair<T>(x.w);
        return {make_float4(a.x, a.y, b.x, b.y), make_float4(c.x, c.y, d.x, d.y)};
    }
}

template <typename T>
__device__ __forceinline__ void fma_vector(float (&sums)[4], const uint4 &w, const XVector &x) {
    const float2 a = unpack_pair<T>(w.x), b = unpack_pair<T>(w.y);
    const float2 c = unpack_pair<T>(w.z), d = unpack_pair<T>(w.w);
    sums[0] = fmaf(a.x, x.low.x, sums[0]);
    sums[1] = fmaf(a.y, x.low.y, sums[1]);
    sums[2] = fmaf(b.x, x.low.z, sums[2]);
    sums[3] = fmaf(b.y, x.low.w, sums[3]);
    sums[0] = fmaf(c.x, x.high.x, sums[0]);
    sums[1] = fmaf(c.y, x.high.y, sums[1]);
    sums[2] = fmaf(d.x, x.high.z, sums[2]);
    sums[3] = fmaf(d.y, x.high.w, sums[3]);
}

// Copies x into shared memory. Of every 8 values of a normalized row the first four go to one
// half and the others to the second, so that 16-byte reads of the lanes hit different banks.
// Leaves each warp's sum of squares.
template <typename T, bool Norms>
__device__ __forceinline__ void load_x(unsigned char *shared, const GemvConfig &s,
                                       const GemmInput &in,
                                       const float4 (&scale)[kGemvNormVectors]) {
    if constexpr (Norms) {
        const auto *from = reinterpret_cast<const float4 *>(in.residual_row(0));
        auto *to = reinterpret_cast<float4 *>(shared + s.x_at);
        float4 values[kGemvNormVectors];
        float squares = 0;
#pragma unroll
        for (int j = 0; j < kGemvNormVectors; ++j) {
            const int at = threadIdx.x + j * blockDim.x;
            values[j] = load_or_zero(from, at, in.k / 4);
        }
#pragma unroll
        for (int j = 0; j < kGemvNormVectors; ++j) {
            const int at = threadIdx.x + j * blockDim.x;
            const float4 v = values[j], w = scale[j];
            squares += sum_of_squares(v);
            if (at < in.k / 4) {
                to[(at & 1) * (in.k / 8) + at / 2] =
                    make_float4(v.x * w.x, v.y * w.y, v.z * w.z, v.w * w.w);
            }
        }
        squares = warp_sum(squares);
        if (threadIdx.x % kWarpSize == 0) {
            reinterpret_cast<float *>(shared + s.squares_at)[threadIdx.x / kWarpSize] = squares;
        }
    } else {
        const auto *from = static_cast<const uint4 *>(in.x);
        auto *to = reinterpret_cast<uint4 *>(shared + s.x_at);
#pragma unroll 4
        for (int at = threadIdx.x; at < in.k / 8; at += blockDim.x) {
            to[at] = from[at];
        }
    }
}

template <typename T, bool Norms, typename Epilogue>
__global__ void __launch_bounds__(kGemvMaxWarps *kWarpSize, 2)
    gemv_sm90_kernel(GemmInput in, Epilogue epilogue, GemvConfig s) {
#if __CUDA_ARCH__ >= 900
    extern __shared__ __align__(128) unsigned char shared[];
    const int lane = threadIdx.x % kWarpSize;
    const int warp = threadIdx.x / kWarpSize;
    const int first = int(int64_t(blockIdx.x) * s.n_units / gridDim.x);
    const int own_units = int(int64_t(blockIdx.x + 1) * s.n_units / gridDim.x) - first;
    // This warp computes one K split of units first_unit, + at_once, ...
    const int at_once = s.warps / s.k_splits;
    const int first_unit = warp / s.k_splits;
    const int k_split = warp - first_unit * s.k_splits;
    const int split_begin = k_split * s.k_split;
    const int split_end = min(split_begin + s.k_split, in.k);
    const uint32_t row_bytes = uint32_t(s.k_block) * 2; // per stage
    const uint32_t buffer_at = uint32_t(warp * s.stages) * 2 * row_bytes;
    const uint32_t full = smem_address(shared) + s.barriers_at + uint32_t(warp * s.stages) * 8;

    int left = (max(0, own_units - first_unit) + at_once - 1) / at_once * s.k_blocks; // copies left
    if (left <= s.late) {
        launch_dependents();
    }
    // Next copy: lane 0 copies the first row of a unit, lane 1 the second.
    int fill_unit = first_unit, fill_begin = split_begin, fill_stage = 0;
    const T *row = nullptr;
    const uint64_t policy = l2_evict_first_policy();
    const uint32_t fill_to = smem_address(shared) + buffer_at + uint32_t(lane & 1) * row_bytes;
    const auto fill = [&] {
        if (left == 0) {
            return;
        }
        if (--left == s.late) {
            launch_dependents();
        }
        if (fill_begin == split_begin) {
            row = epilogue.row(first + fill_unit, lane & 1, 0);
            if (row == nullptr) { // read another row, its sum is dropped
                row = epilogue.row(first + fill_unit, 0, 0);
            }
        }
        const uint32_t bytes = uint32_t(max(0, min(s.k_block, split_end - fill_begin))) * 2;
        const uint32_t barrier = full + uint32_t(fill_stage) * 8;
        if (lane == 0) {
            mbarrier_arrive_expect_tx(barrier, 2 * bytes);
        }
        if (lane < 2 && bytes > 0) {
            cp_async_bulk(fill_to + uint32_t(fill_stage) * 2 * row_bytes, row + fill_begin, bytes,
                          barrier, policy);
        }
        fill_stage = fill_stage + 1 == s.stages ? 0 : fill_stage + 1;
        fill_begin += s.k_block;
        if (fill_begin >= split_begin + s.k_blocks * s.k_block) {
            fill_begin = split_begin;
            fill_unit += at_once;
        }
    };
    if (lane == 0) {
        for (int stage = 0; stage < s.stages; ++stage) {
            mbarrier_init(full + uint32_t(stage) * 8, 1);
        }
        fence_mbarrier_init();
    }
    __syncwarp();
    for (int stage = 0; stage < s.stages; ++stage) {
        fill();
    }
    float4 scale[kGemvNormVectors]; // constant: may be read before grid_dependency_wait()
    if constexpr (Norms) {
#pragma unroll
        for (int j = 0; j < kGemvNormVectors; ++j) {
            const int at = threadIdx.x + j * blockDim.x;
            scale[j] = load_or_zero(reinterpret_cast<const float4 *>(in.norm_weight), at, in.k / 4);
        }
    }
    // The unit whose result this thread stores; the last warps have the fewest units and store
    // first.
    const int own = int(blockDim.x - 1 - threadIdx.x);
    typename Epilogue::Operands operands{};
    if (own < own_units) {
        operands = epilogue.load_weights(first + own, 0);
    }
    grid_dependency_wait();
    load_x<T, Norms>(shared, s, in, scale);
    if (own < own_units) {
        epilogue.load_rows(first + own, 0, 0, &operands);
    }
    __syncthreads();

    auto *sums = reinterpret_cast<float *>(shared + s.sums_at);
    int stage = 0;
    uint32_t parity = 0;
    for (int unit = first_unit; unit < own_units; unit += at_once) {
        float low[4] = {}, high[4] = {};
        for (int k_block = 0; k_block < s.k_blocks; ++k_block) {
            const int begin = split_begin + k_block * s.k_block;
            // may be 0 or negative: no work
            const int chunks = min(s.k_block, split_end - begin) / 8;
            const auto *low_row = reinterpret_cast<const uint4 *>(shared + buffer_at +
                                                                  uint32_t(stage) * 2 * row_bytes);
            const auto *high_row = low_row + row_bytes / 16;
            mbarrier_wait_parity(full + uint32_t(stage) * 8, parity);
#pragma unroll 3
            for (int c = lane; c < chunks; c += kWarpSize) {
                const XVector x = load_x_vector<T, Norms>(shared + s.x_at, begin / 8 + c, in.k);
                fma_vector<T>(low, low_row[c], x);
                fma_vector<T>(high, high_row[c], x);
            }
            __syncwarp();
            fill();
            if (++stage == s.stages) {
                stage = 0;
                parity ^= 1;
            }
        }
        float low_sum = (low[0] + low[1]) + (low[2] + low[3]);
        float high_sum = (high[0] + high[1]) + (high[2] + high[3]);
#pragma unroll
        for (int step = 16; step > 0; step >>= 1) {
            low_sum += __shfl_xor_sync(kFullMask, low_sum, step);
            high_sum += __shfl_xor_sync(kFullMask, high_sum, step);
        }
        if (lane == 0) {
            sums[2 * unit * s.k_splits + k_split] = low_sum;
            sums[(2 * unit + 1) * s.k_splits + k_split] = high_sum;
        }
    }
    float factor = 1;
    typename Epilogue::Prepared prepared{};
    if (own < own_units) {
        if constexpr (Norms) {
            float squares = 0;
            for (int w = 0; w < s.warps; ++w) {
                squares += reinterpret_cast<const float *>(shared + s.squares_at)[w];
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
#endif
}

// Whether the kernel supports this device and shape; K of a fused norm is limited.
inline bool can_gemv_sm90(const device::CudaStream &stream, int64_t m, int64_t k, bool norms) {
    return has_bulk_copy(stream) && !stream.is_exact && m == 1 && k % 8 == 0 && k <= kGemvMaxK &&
           (!norms || k <= kGemvManyWarps * kWarpSize * 4 * kGemvNormVectors);
}

template <typename T, typename Epilogue>
void run_gemv_sm90(const device::CudaStream &stream, const GemmInput &in, Epilogue epilogue,
                   const GemvTuning &tuning = {}) {
    epilogue.items = 1;
    const int n_units = int(epilogue.count());
    const int grid = std::min(stream.n_sms, n_units);
    const GemvConfig shape = gemv_config(in, n_units, grid, tuning);
    const auto run = [&](auto kernel) {
        set_max_dynamic_smem(kernel,
                             size_t(stream.max_shared_bytes)); // the largest config of any launch
        launch(stream, kernel, unsigned(grid), unsigned(shape.warps * kWarpSize), shape.bytes, true,
               in, epilogue, shape);
    };
    if (in.residual == nullptr) {
        run(gemv_sm90_kernel<T, false, Epilogue>);
    } else {
        run(gemv_sm90_kernel<T, true, Epilogue>);
    }
}

} // namespace llaisys::ops::cuda
