// GEMV (M = 1) with 16-bit weights on compute capability 9: the kernel body of gemv_pipeline.cuh, with
// stages of 1 to 4 KB per row. x is in shared memory unchanged, or for a fused norm as f32 times the
// norm weight. A lane adds in four chains.
#pragma once

#include "ops/cuda/gemv_pipeline.cuh"
#include "ops/cuda/tuning_sm90.hpp"

namespace llaisys::ops::cuda {

constexpr int kGemvNormVectors = 4; // float4 values per thread of a normalized row

// The end of a split counts as 64 values.
inline GemvConfig gemv_config(const GemmInput &in, int n_units, int grid,
                              const GemvTuning &tuning) {
    constexpr int kLine = 64; // values per 128-byte line
    const bool norms = in.residual != nullptr;
    const int units = (n_units + grid - 1) / grid; // largest per block
    const bool has_long_rows = !norms && in.k > kGemvLongK;
    const bool is_long =
        has_long_rows || (norms && int64_t(units) * in.k * 4 > kGemvLargeBlockBytes);
    const int x_bytes = in.k * (norms ? 4 : 2);
    const auto choose = [](int tuned, int usual) { return tuned > 0 ? tuned : usual; };
    GemvConfig s{};
    s.n_units = n_units;
    // enough warps to hold x
    const int holding = norms ? (in.k - 1) / (kWarpSize * 4 * kGemvNormVectors) + 1 : 1;
    s.choose_partition(units, holding, kGemvMaxWarps,
                       [&](int splits) { return in.k / splits + 64; });
    s.warps = choose(tuning.warps, s.warps);
    s.k_splits = choose(tuning.k_splits, s.k_splits);
    s.split = (in.k + s.k_splits * 8 - 1) / (s.k_splits * 8) * 8;
    const int buffer =
        std::min(is_long ? kGemvLargeBufferBytes : kGemvBufferBytes, kGemvMaxSmem - x_bytes);
    const int stages = choose(tuning.stages, has_long_rows ? 3 : 2);
    const int most = choose(tuning.k_block, buffer / (stages * 4 * s.warps) / kLine * kLine);
    s.blocks = (s.split + most - 1) / most;
    s.block = (s.split + s.blocks * kLine - 1) / (s.blocks * kLine) * kLine;
    s.row_pitch = uint32_t(s.block) * 2;
    s.stages = std::min(stages, s.wanted_stages(units));
    s.late = choose(tuning.late, kGemvLate);
    s.x_at = (uint32_t(s.warps * s.stages) * 2 * s.row_pitch + 127) / 128 * 128;
    s.place_sums(s.x_at + (uint32_t(x_bytes) + 15) / 16 * 16, units);
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

// The product of gemv_pipeline.cuh; steps are values.
template <typename T, bool Norms> struct GemvRows {
    struct Sums {
        float chains[4];
    };
    const GemmInput &in;
    float4 scale[kGemvNormVectors]; // norm weights

    static __device__ __forceinline__ float total(const Sums &sums) {
        return (sums.chains[0] + sums.chains[1]) + (sums.chains[2] + sums.chains[3]);
    }
    template <typename Epilogue>
    __device__ __forceinline__ const unsigned char *row(const Epilogue &epilogue, int unit,
                                                        int group) const {
        const T *row = epilogue.row(unit, group, 0);
        if (row == nullptr) { // read another row, its sum is dropped
            row = epilogue.row(unit, 0, 0);
        }
        return reinterpret_cast<const unsigned char *>(row);
    }
    __device__ __forceinline__ int64_t offset(int begin) const { return int64_t(begin) * 2; }
    __device__ __forceinline__ uint32_t bytes(int, int count) const { return uint32_t(count) * 2; }
    __device__ __forceinline__ bool norms() const { return Norms; }
    __device__ __forceinline__ void load_weights() {
        if constexpr (Norms) {
#pragma unroll
            for (int j = 0; j < kGemvNormVectors; ++j) {
                const int at = threadIdx.x + j * blockDim.x;
                scale[j] =
                    load_or_zero(reinterpret_cast<const float4 *>(in.norm_weight), at, in.k / 4);
            }
        }
    }

    // Of every 8 values of a normalized row the first four go to one half and the others to the
    // second, so that 16-byte reads of the lanes hit different banks.
    __device__ __forceinline__ void load_x(unsigned char *shared, const GemvConfig &s) const {
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
            store_squares(shared, s, squares);
        } else {
            const auto *from = static_cast<const uint4 *>(in.x);
            auto *to = reinterpret_cast<uint4 *>(shared + s.x_at);
#pragma unroll 4
            for (int at = threadIdx.x; at < in.k / 8; at += blockDim.x) {
                to[at] = from[at];
            }
        }
    }

    __device__ __forceinline__ void add(Sums &low, Sums &high, const unsigned char *shared,
                                        const GemvConfig &s, const unsigned char *row, int begin,
                                        int end) const {
        const auto *low_row = reinterpret_cast<const uint4 *>(row);
        const auto *high_row = low_row + s.row_pitch / 16;
        const int chunks = (end - begin) / 8; // 0 or negative: no work
#pragma unroll 3
        for (int c = threadIdx.x % kWarpSize; c < chunks; c += kWarpSize) {
            const XVector x = load_x_vector<T, Norms>(shared + s.x_at, begin / 8 + c, in.k);
            fma_vector<T>(low.chains, low_row[c], x);
            fma_vector<T>(high.chains, high_row[c], x);
        }
    }
};

template <typename T, bool Norms, typename Epilogue>
__global__ void __launch_bounds__(kGemvMaxWarps *kWarpSize, 2)
    gemv_sm90_kernel(GemmInput in, Epilogue epilogue, GemvConfig s) {
#if __CUDA_ARCH__ >= 900
    extern __shared__ __align__(128) unsigned char shared[];
    GemvRows<T, Norms> product{in};
    run_gemv(shared, s, in, product, epilogue, in.k);
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
    if (in.residual == nullptr) {
        launch_gemv(stream, gemv_sm90_kernel<T, false, Epilogue>, grid, epilogue, shape, in);
    } else {
        launch_gemv(stream, gemv_sm90_kernel<T, true, Epilogue>, grid, epilogue, shape, in);
    }
}

} // namespace llaisys::ops::cuda
