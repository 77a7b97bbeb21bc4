// GEMV (M = 1) with quantised weights (ops/quant_rows.hpp) on compute capability 9: the kernel body of
// gemv_pipeline.cuh. A lane reads chunks of 16 bytes of int4 or int8 codes; x is 14-bit integers in two
// bytes with a scale per chunk (quant_small_rows.cuh), multiplied by dp4a on both bytes. (f8:
// gemm_tma_quant.cuh is faster.)
//
// x is in shared memory in arrays of 16 bytes per chunk, so that the lanes read adjacent vectors.
#pragma once

#include "ops/cuda/gemv_pipeline.cuh"
#include "ops/cuda/quant_small_rows.cuh"

namespace llaisys::ops::cuda {

LLAISYS_HOST_DEVICE constexpr int quant_chunk(QuantCodes codes) { // values in 16 bytes
    return codes == QuantCodes::int4 ? 32 : 16;
}
// 16-byte arrays of x per chunk.
LLAISYS_HOST_DEVICE constexpr int gemv_quant_arrays(QuantCodes codes) {
    return codes == QuantCodes::int8 ? 2 : 4;
}

struct GemvQuantConfig : GemvConfig {
    int segments, group_shift; // segments: of a row
    uint32_t segment_bytes, scales_at;
};

constexpr int kGemvQuantBuffer = 168 << 10; // bytes of stages
constexpr int kGemvQuantStages = 2;

// The end of a split counts as 128 values.
inline GemvQuantConfig gemv_quant_config(const GemmInput &in, const QuantRowLayout &layout,
                                         int n_units, int grid) {
    const int64_t segment = quant_segment(layout.codes);
    const int units = (n_units + grid - 1) / grid; // largest per block
    GemvQuantConfig s{};
    s.n_units = n_units;
    s.segments = int((in.k + segment - 1) / segment);
    s.group_shift = group_shift(layout.group);
    s.segment_bytes = uint32_t(layout.segment_bytes(std::min<int64_t>(segment, in.k)));
    s.choose_partition(units, 1, s.segments, [&](int splits) {
        return std::min<int64_t>(in.k, (s.segments + splits - 1) / splits * segment) + 128;
    });
    const int chunks = in.k / quant_chunk(layout.codes);
    const uint32_t x_bytes = uint32_t(chunks) * uint32_t(gemv_quant_arrays(layout.codes)) * 16;
    const uint32_t scales_bytes = (uint32_t(chunks) * 8 + 15) / 16 * 16;
    const int buffer = std::min(kGemvQuantBuffer, kGemvMaxSmem - int(x_bytes + scales_bytes));
    const int step_bytes = 2 * s.warps * int(s.segment_bytes);
    int stages = kGemvQuantStages;
    while (stages > 1 && buffer < stages * step_bytes) {
        --stages;
    }
    const int room = std::max(1, buffer / (stages * step_bytes));
    s.split = (s.segments + s.k_splits - 1) / s.k_splits;
    s.blocks = (s.split + room - 1) / room;
    s.block = (s.split + s.blocks - 1) / s.blocks;
    s.blocks = (s.split + s.block - 1) / s.block;
    s.stages = std::min(stages, s.wanted_stages(units));
    s.late = kGemvLate;
    s.row_pitch = s.segment_bytes * uint32_t(s.block);
    s.x_at = uint32_t(s.warps * s.stages) * 2 * s.row_pitch;
    s.scales_at = s.x_at + x_bytes;
    s.place_sums(s.scales_at + scales_bytes, units);
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

// The product of gemv_pipeline.cuh; steps are segments.
template <typename T, QuantCodes Codes> struct GemvQuantRows {
    static constexpr int kSegment = int(quant_segment(Codes));
    static constexpr int kChunk = quant_chunk(Codes);
    using Sums = float;
    const GemmInput &in;
    const QuantMatrix &w;
    const GemvQuantConfig &s;

    static __device__ __forceinline__ float total(float sum) { return sum; }
    template <typename Epilogue>
    __device__ __forceinline__ const unsigned char *row(const Epilogue &epilogue, int unit,
                                                        int group) const {
        int64_t index = epilogue.row_index(unit, group, 0);
        if (index < 0) { // read another row, its sum is dropped
            index = epilogue.row_index(unit, 0, 0);
        }
        return w.bytes + index * w.row_bytes;
    }
    __device__ __forceinline__ int64_t offset(int begin) const {
        return int64_t(begin) * s.segment_bytes;
    }
    __device__ __forceinline__ uint32_t bytes(int begin, int count) const {
        const int64_t last = begin + count == s.segments
                                 ? w.layout.segment_bytes(in.k - (s.segments - 1) * kSegment)
                                 : int64_t(s.segment_bytes);
        return count > 0 ? uint32_t(count - 1) * s.segment_bytes + uint32_t(last) : 0;
    }
    __device__ __forceinline__ bool norms() const { return in.residual != nullptr; }
    __device__ __forceinline__ void load_weights() const {}
    __device__ __forceinline__ void load_x(unsigned char *shared, const GemvConfig &) const {
        store_squares(shared, s,
                      norms() ? load_gemv_x<T, true, Codes>(shared, s, in)
                              : load_gemv_x<T, false, Codes>(shared, s, in));
    }

    __device__ __forceinline__ void add(float &low, float &high, const unsigned char *shared,
                                        const GemvConfig &, const unsigned char *low_row, int begin,
                                        int end) const {
        const int lane = threadIdx.x % kWarpSize;
        const uint32_t array = uint32_t(in.k / kChunk) * 16;
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
    }
};

template <typename T, QuantCodes Codes, typename Epilogue>
__global__ void __launch_bounds__(kGemvMaxWarps *kWarpSize, 1)
    gemv_quant_kernel(GemmInput in, QuantMatrix w, Epilogue epilogue, GemvQuantConfig s) {
#if __CUDA_ARCH__ >= 900
    extern __shared__ __align__(1024) unsigned char shared[];
    const GemvQuantRows<T, Codes> product{in, w, s};
    run_gemv(shared, s, in, product, epilogue, s.segments);
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
    launch_gemv(stream, gemv_quant_kernel<T, Codes, Epilogue>, grid, epilogue,
                gemv_quant_config(in, w.layout, n_units, grid), in, w);
}

} // namespace llaisys::ops::cuda
