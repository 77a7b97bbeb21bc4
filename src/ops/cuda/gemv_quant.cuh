// GEMV (M = 1) with quantised weights (ops/quant_rows.hpp) on compute capability 9, epilogues of
// gemm_epilogue.cuh (units of one item). Bound: reading the weights once from DRAM.
//
// The structure of gemv_sm90.cuh: one block per SM, every warp has its own pipeline of bulk copies
// of the two weight rows of a unit, or of some segments of them. A lane reads chunks of 16 bytes of
// int4 or int8 codes; x is 14-bit integers in two bytes with a scale per chunk
// (quant_small_rows.cuh), multiplied by dp4a on both bytes. (f8: gemm_tma_quant.cuh is faster.)
//
// x is in shared memory in arrays of 16 bytes per chunk, so that the lanes read adjacent vectors.
#pragma once

#include "ops/cuda/gemv_sm90.cuh"
#include "ops/cuda/quant_small_rows.cuh"

namespace llaisys::ops::cuda {

LLAISYS_HOST_DEVICE constexpr int quant_chunk(QuantCodes codes) { // values in 16 bytes
    return codes == QuantCodes::int4 ? 32 : 16;
}
// 16-byte arrays of x per chunk.
LLAISYS_HOST_DEVICE constexpr int gemv_quant_arrays(QuantCodes codes) {
    return codes == QuantCodes::int8 ? 2 : 4;
}

struct GemvQuantConfig {
    int n_units, warps, k_splits, segments;     // segments: of a row
    int split_segments, block_segments, blocks; // of a split; of a stage; stages of a split
    int stages, late, group_shift;
    uint32_t segment_bytes, row_pitch; // row_pitch: of a stage
    uint32_t x_at, scales_at, sums_at, squares_at, barriers_at, bytes;
};

constexpr int kGemvQuantBuffer = 168 << 10; // bytes of stages
constexpr int kGemvQuantStages = 2;

inline GemvQuantConfig gemv_quant_config(const GemmInput &in, const QuantRowLayout &layout,
                                         int n_units, int grid) {
    const int64_t segment = quant_segment(layout.codes);
    const int units = (n_units + grid - 1) / grid; // largest per block
    GemvQuantConfig s{};
    s.n_units = n_units;
    s.segments = int((in.k + segment - 1) / segment);
    s.group_shift = group_shift(layout.group);
    s.segment_bytes = uint32_t(layout.segment_bytes(std::min<int64_t>(segment, in.k)));
    int64_t lowest = INT64_MAX;
    for (int warps = std::clamp(units, kGemvFewWarps, kGemvManyWarps); warps <= kGemvMaxWarps;
         ++warps) {
        for (int splits = 1; splits <= std::min(warps, s.segments); ++splits) {
            const int at_once = warps / splits; // units in parallel
            const int64_t rounds = (units + at_once - 1) / at_once;
            const int64_t values =
                std::min<int64_t>(in.k, (s.segments + splits - 1) / splits * segment);
            const int64_t cost = rounds * (values + 128) * warps;
            if (warps % splits == 0 && cost < lowest) {
                lowest = cost;
                s.warps = warps;
                s.k_splits = splits;
            }
        }
    }
    const int chunks = in.k / quant_chunk(layout.codes);
    const uint32_t x_bytes = uint32_t(chunks) * uint32_t(gemv_quant_arrays(layout.codes)) * 16;
    const uint32_t scales_bytes = (uint32_t(chunks) * 8 + 15) / 16 * 16;
    int stages = kGemvQuantStages;
    const int buffer = std::min(kGemvQuantBuffer, kGemvMaxSmem - int(x_bytes + scales_bytes));
    s.split_segments = (s.segments + s.k_splits - 1) / s.k_splits;
    while (stages > 1 && buffer < stages * 2 * s.warps * int(s.segment_bytes)) {
        --stages;
    }
    const int room = std::max(1, buffer / (stages * 2 * s.warps * int(s.segment_bytes)));
    s.blocks = (s.split_segments + room - 1) / room;
    s.block_segments = (s.split_segments + s.blocks - 1) / s.blocks;
    s.blocks = (s.split_segments + s.block_segments - 1) / s.block_segments;
    const int at_once = s.warps / s.k_splits;
    s.stages = std::min(stages, (units + at_once - 1) / at_once * s.blocks);
    s.late = kGemvLate;
    s.row_pitch = s.segment_bytes * uint32_t(s.block_segments);
    s.x_at = uint32_t(s.warps * s.stages) * 2 * s.row_pitch;
    s.scales_at = s.x_at + x_bytes;
    s.sums_at = s.scales_at + scales_bytes;
    s.squares_at = s.sums_at + uint32_t(2 * units * s.k_splits) * 4;
    s.barriers_at = (s.squares_at + uint32_t(s.warps) * 4 + 7) / 8 * 8;
    s.bytes = s.barriers_at + uint32_t(s.warps * s.stages) * 8;
    return s;
}

// Copies x into shared memory by all threads; returns the sum of squares of the thread's values.
template <typename T, bool Norms, QuantCodes Codes>
__device__ __forceinline__ float load_gemv_x(unsigned char *shared, const GemvQuantConfig &s,
                                             const GemmInput &in) {
    constexpr int kOctets = quant_chunk(Codes) / 8; // of a chunk
    const int lane = threadIdx.x % kWarpSize;
    const int count = in.k / 8;
    const uint32_t array = uint32_t(in.k / quant_chunk(Codes)) * 16;
    float squares = 0;
    for (int from = int(threadIdx.x) - lane; from < count; from += int(blockDim.x)) {
        const int at = from + lane;
        float values[8] = {};
        if (at < count) {
            load_8<T, Norms>(in, 0, at, values, &squares);
        }
        const int chunk = at / kOctets, octet = at % kOctets;
        unsigned char *to = shared + s.x_at + uint32_t(chunk) * 16;
        float largest = 0;
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            largest = fmaxf(largest, fabsf(values[i]));
        }
#pragma unroll
        for (int step = 1; step < kOctets; step *= 2) {
            largest = fmaxf(largest, __shfl_xor_sync(kFullMask, largest, step));
        }
        uint2 high, low;
        int sum = int_planes<Codes>(values, largest, &high, &low);
#pragma unroll
        for (int step = 1; step < kOctets; step *= 2) {
            sum += __shfl_xor_sync(kFullMask, sum, step);
        }
        if (at < count) {
            to += uint32_t(octet / 2) * array + octet % 2 * 8;
            *reinterpret_cast<uint2 *>(to) = high;
            *reinterpret_cast<uint2 *>(to + uint32_t(kOctets / 2) * array) = low;
            if (octet == 0) {
                const float scale = largest / kSmallRowLargest;
                reinterpret_cast<float2 *>(shared + s.scales_at)[chunk] =
                    make_float2(scale, scale * float(sum));
            }
        }
    }
    return squares;
}

// x of a chunk.
template <QuantCodes Codes> struct GemvChunk {
    uint4 arrays[gemv_quant_arrays(Codes)];
    float2 scale;

    __device__ __forceinline__ void load(const unsigned char *shared, const GemvQuantConfig &s,
                                         int chunk, uint32_t array) {
#pragma unroll
        for (int i = 0; i < gemv_quant_arrays(Codes); ++i) {
            arrays[i] = *reinterpret_cast<const uint4 *>(shared + s.x_at + uint32_t(i) * array +
                                                         uint32_t(chunk) * 16);
        }
        scale = reinterpret_cast<const float2 *>(shared + s.scales_at)[chunk];
    }

    // sum + codes * x of the chunk.
    __device__ __forceinline__ float add(float sum, const uint4 &codes,
                                         const QuantParams &params) const {
        const uint32_t words[4] = {codes.x, codes.y, codes.z, codes.w};
        if constexpr (Codes == QuantCodes::int4) {
            int high[2] = {}, low[2] = {kMagicBits, 0};
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int a = int(words[i] & 0x0f0f0f0fu), b = int(words[i] >> 4 & 0x0f0f0f0fu);
                const uint4 &h = arrays[i / 2], &l = arrays[2 + i / 2];
                high[0] = __dp4a(a, int(i % 2 == 0 ? h.x : h.z), high[0]);
                high[1] = __dp4a(b, int(i % 2 == 0 ? h.y : h.w), high[1]);
                low[0] = __dp4a(a, int(i % 2 == 0 ? l.x : l.z), low[0]);
                low[1] = __dp4a(b, int(i % 2 == 0 ? l.y : l.w), low[1]);
            }
            const int all = (high[0] + high[1]) * 64 + (low[0] + low[1]);
            sum = fmaf(params.m(), scale.y, sum);
            return fmaf(__int_as_float(all) - kMagic, scale.x * params.s(), sum);
        } else {
            static_assert(Codes == QuantCodes::int8);
            const uint32_t h[4] = {arrays[0].x, arrays[0].y, arrays[0].z, arrays[0].w};
            const uint32_t l[4] = {arrays[1].x, arrays[1].y, arrays[1].z, arrays[1].w};
            int high = 0, low = 0;
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                high = __dp4a(int(words[i]), int(h[i]), high);
                low = __dp4a(int(words[i]), int(l[i]), low);
            }
            sum = fmaf(params.m(), scale.y, sum);
            return fmaf(__int2float_rn(high * 64 + low), scale.x * params.s(), sum);
        }
    }
};

template <typename T, QuantCodes Codes, typename Epilogue>
__global__ void __launch_bounds__(kGemvMaxWarps *kWarpSize, 1)
    gemv_quant_kernel(GemmInput in, QuantMatrix w, Epilogue epilogue, GemvQuantConfig s) {
#if __CUDA_ARCH__ >= 900
    constexpr int kSegment = int(quant_segment(Codes));
    constexpr int kChunk = quant_chunk(Codes);
    extern __shared__ __align__(1024) unsigned char shared[];
    const int lane = threadIdx.x % kWarpSize;
    const int warp = threadIdx.x / kWarpSize;
    const int first = int(int64_t(blockIdx.x) * s.n_units / gridDim.x);
    const int own_units = int(int64_t(blockIdx.x + 1) * s.n_units / gridDim.x) - first;
    // This warp computes one K split of units first_unit, + at_once, ...
    const int at_once = s.warps / s.k_splits;
    const int first_unit = warp / s.k_splits;
    const int k_split = warp - first_unit * s.k_splits;
    const int split_begin = k_split * s.split_segments; // segments
    const int split_end = min(split_begin + s.split_segments, s.segments);
    const uint32_t buffer_at = uint32_t(warp * s.stages) * 2 * s.row_pitch;
    const uint32_t full = smem_address(shared) + s.barriers_at + uint32_t(warp * s.stages) * 8;

    int left = (max(0, own_units - first_unit) + at_once - 1) / at_once * s.blocks; // copies left
    if (left <= s.late) {
        launch_dependents();
    }
    // Next copy: lane 0 copies the first row of a unit, lane 1 the second.
    int fill_unit = first_unit, fill_begin = split_begin, fill_stage = 0;
    const unsigned char *row = nullptr;
    const uint64_t policy = l2_evict_first_policy();
    const uint32_t fill_to = smem_address(shared) + buffer_at + uint32_t(lane & 1) * s.row_pitch;
    const auto fill = [&] {
        if (left == 0) {
            return;
        }
        if (--left == s.late) {
            launch_dependents();
        }
        if (fill_begin == split_begin) {
            int64_t index = epilogue.row_index(first + fill_unit, lane & 1, 0);
            if (index < 0) { // read another row, its sum is dropped
                index = epilogue.row_index(first + fill_unit, 0, 0);
            }
            row = w.bytes + index * w.row_bytes;
        }
        const int count = max(0, min(s.block_segments, split_end - fill_begin));
        const int64_t last = fill_begin + count == s.segments
                                 ? w.layout.segment_bytes(in.k - (s.segments - 1) * kSegment)
                                 : int64_t(s.segment_bytes);
        const uint32_t bytes =
            count > 0 ? uint32_t(count - 1) * s.segment_bytes + uint32_t(last) : 0;
        const uint32_t barrier = full + uint32_t(fill_stage) * 8;
        if (lane == 0) {
            mbarrier_arrive_expect_tx(barrier, 2 * bytes);
        }
        if (lane < 2 && bytes > 0) {
            cp_async_bulk(fill_to + uint32_t(fill_stage) * 2 * s.row_pitch,
                          row + int64_t(fill_begin) * s.segment_bytes, bytes, barrier, policy);
        }
        fill_stage = fill_stage + 1 == s.stages ? 0 : fill_stage + 1;
        fill_begin += s.block_segments;
        if (fill_begin >= split_begin + s.blocks * s.block_segments) {
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
    // The unit whose result this thread stores.
    const int own = int(blockDim.x - 1 - threadIdx.x);
    typename Epilogue::Operands operands{};
    if (own < own_units) {
        operands = epilogue.load_weights(first + own, 0);
    }
    grid_dependency_wait();
    const bool norms = in.residual != nullptr;
    const float squares = warp_sum(norms ? load_gemv_x<T, true, Codes>(shared, s, in)
                                         : load_gemv_x<T, false, Codes>(shared, s, in));
    if (lane == 0) {
        reinterpret_cast<float *>(shared + s.squares_at)[warp] = squares;
    }
    if (own < own_units) {
        epilogue.load_rows(first + own, 0, 0, &operands);
    }
    __syncthreads();

    const uint32_t array = uint32_t(in.k / kChunk) * 16;
    auto *sums = reinterpret_cast<float *>(shared + s.sums_at);
    int stage = 0;
    uint32_t parity = 0;
    for (int unit = first_unit; unit < own_units; unit += at_once) {
        float low = 0, high = 0;
        for (int block = 0; block < s.blocks; ++block) {
            const int begin = split_begin + block * s.block_segments;
            const int end = min(begin + s.block_segments, split_end);
            const unsigned char *low_row = shared + buffer_at + uint32_t(stage) * 2 * s.row_pitch;
            mbarrier_wait_parity(full + uint32_t(stage) * 8, parity);
            for (int segment = begin; segment < end; ++segment, low_row += s.segment_bytes) {
                const int values = min(kSegment, in.k - segment * kSegment);
                const unsigned char *high_row = low_row + s.row_pitch;
                const int params_at = Codes == QuantCodes::int4 ? values / 2 : values;
                const int chunks = values / kChunk;
#pragma unroll 2
                for (int from = 0; from < chunks; from += kWarpSize) { // warp-uniform
                    const bool is_inside = from + lane < chunks;
                    const int c = is_inside ? from + lane : from;
                    const uint4 low_codes = reinterpret_cast<const uint4 *>(low_row)[c];
                    const uint4 high_codes = reinterpret_cast<const uint4 *>(high_row)[c];
                    const int param_bytes = Codes == QuantCodes::int4 ? 4 : w.layout.param_bytes;
                    const int group = c * kChunk >> s.group_shift;
                    QuantParams low_params = load_params(low_row + params_at, group, param_bytes);
                    QuantParams high_params = load_params(high_row + params_at, group, param_bytes);
                    low_params.bits = is_inside ? low_params.bits : 0; // adds 0
                    high_params.bits = is_inside ? high_params.bits : 0;
                    GemvChunk<Codes> x;
                    x.load(shared, s, segment * (kSegment / kChunk) + c, array);
                    low = x.add(low, low_codes, low_params);
                    high = x.add(high, high_codes, high_params);
                }
            }
            __syncwarp();
            fill();
            if (++stage == s.stages) {
                stage = 0;
                parity ^= 1;
            }
        }
#pragma unroll
        for (int step = 16; step > 0; step >>= 1) {
            low += __shfl_xor_sync(kFullMask, low, step);
            high += __shfl_xor_sync(kFullMask, high, step);
        }
        if (lane == 0) {
            sums[2 * unit * s.k_splits + k_split] = low;
            sums[(2 * unit + 1) * s.k_splits + k_split] = high;
        }
    }
    float factor = 1;
    if (norms && own < own_units) {
        float all = 0;
        for (int i = 0; i < s.warps; ++i) {
            all += reinterpret_cast<const float *>(shared + s.squares_at)[i];
        }
        factor = 1.0f / sqrtf(all / float(in.k) + in.epsilon);
    }
    __syncthreads();
    for (int u = own; u < own_units; u += int(blockDim.x)) {
        if (u != own) {
            operands = load_operands(epilogue, first + u, 0, 0);
        }
        float low = 0, high = 0;
        for (int i = 0; i < s.k_splits; ++i) {
            low += sums[2 * u * s.k_splits + i];
            high += sums[(2 * u + 1) * s.k_splits + i];
        }
        epilogue.store(first + u, 0, 0, low * factor, high * factor,
                       epilogue.prepare(first + u, 0, operands));
    }
#endif
}

// Whether the kernel supports this device, layout and shape.
inline bool can_gemv_quant(const device::CudaStream &stream, const QuantRowLayout &layout,
                           int64_t m, int64_t k) {
    return layout.codes != QuantCodes::f8 && has_bulk_copy(stream) && !stream.is_exact && m == 1 &&
           k % 32 == 0 && k <= kGemvMaxK && layout.group >= quant_chunk(layout.codes);
}

template <typename T, QuantCodes Codes, typename Epilogue>
void run_gemv_quant(const device::CudaStream &stream, const GemmInput &in, const QuantMatrix &w,
                    Epilogue epilogue) {
    epilogue.items = 1;
    const int n_units = int(epilogue.count());
    const int grid = std::min(stream.n_sms, n_units);
    const GemvQuantConfig shape = gemv_quant_config(in, w.layout, n_units, grid);
    const auto kernel = gemv_quant_kernel<T, Codes, Epilogue>;
    set_max_dynamic_smem(kernel, size_t(stream.max_shared_bytes));
    launch(stream, kernel, unsigned(grid), unsigned(shape.warps * kWarpSize), shape.bytes, true, in,
           w, epilogue, shape);
}

} // namespace llaisys::ops::cuda
