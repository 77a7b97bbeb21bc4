// Tiling of gemm_swiglu_m256.cuh and its choice by shape.
#pragma once

#include "ops/cuda/swiglu_rows.cuh"
#include "ops/cuda/tma.cuh"
#include "ops/cuda/wgmma.cuh"

#include <algorithm>

namespace llaisys::ops::cuda {

constexpr int kSwigluM256MaxM = 256;
constexpr int kSwigluM256Threads = 384; // two consumer warpgroups and the producer
constexpr int kSwigluM256MaxStages = 8;
constexpr uint32_t kSwigluM256Smem = 227 << 10;
// Outputs of a tile, in units of 8; each size is a kernel.
constexpr int kSwigluM256Units[] = {5, 7, 8, 9, 11, 12};

// Rows of x per tile: 128 per 64-row half of a warpgroup.
constexpr int swiglu_m256_halves(int64_t m) { return m <= 128 ? 1 : 2; }
__host__ __device__ constexpr uint32_t swiglu_m256_stage_bytes(int halves, int units) {
    return uint32_t(halves * 128 + units * 16) * kTmaRowBytes;
}
__host__ __device__ constexpr int swiglu_m256_stages(int halves, int units) {
    const int fitting = int((kSwigluM256Smem - 2048) / swiglu_m256_stage_bytes(halves, units));
    return fitting < kSwigluM256MaxStages ? fitting : kSwigluM256MaxStages;
}

// Whether the kernel supports this build, device and product.
template <typename T>
bool can_gemm_swiglu_m256(const device::CudaStream &stream, const SwigluGemm<T> &p) {
    return has_wgmma(stream) && encode_tensor_map() != nullptr && p.m >= 1 &&
           p.m <= kSwigluM256MaxM && p.is_aligned() && p.up > p.gate &&
           stream.max_shared_bytes >= int(kSwigluM256Smem);
}

// The tile size with the shortest estimated time: rounds of tiles on all SMs, each bound by the tensor
// cores (793 TFLOP/s) or by 70 KB per us into an SM, and 2 us to start.
inline int swiglu_m256_units(const device::CudaStream &stream, int64_t m, int64_t n, int64_t k) {
    const int halves = swiglu_m256_halves(m);
    int best = 0;
    double least = 0;
    for (const int units : kSwigluM256Units) {
        const int64_t pairs = (n + 16 * units - 1) / (16 * units); // of tiles
        const int64_t rounds = (pairs + stream.n_sms / 2 - 1) / (stream.n_sms / 2);
        const double operations = 2.0 * halves * 128 * 16 * units * kTmaTileK;
        const double k_tile_us =
            std::max(operations * 132 / 793e6, swiglu_m256_stage_bytes(halves, units) / 70e3);
        const double us = double(rounds) * (double(k) / kTmaTileK * k_tile_us + 2);
        if (best == 0 || us < least) {
            best = units;
            least = us;
        }
    }
    return best;
}

// units: one of kSwigluM256Units. In files of their own (cuda_swiglu_m256_*.cu): the kernels compile
// slowly.
template <typename T>
void run_gemm_swiglu_m256(const device::CudaStream &stream, const SwigluGemm<T> &p, int units);

} // namespace llaisys::ops::cuda
