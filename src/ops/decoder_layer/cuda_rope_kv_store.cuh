// Biases, RoPE and KV store after a GEMM of q, k and v. qkv [n, (heads + 2 kv_heads) * d]; q is
// updated in place.
//
// 8 pairs per thread; their loads overlap with the sine and cosine of the row. Memory-bound: each
// value is read and written once.
#pragma once

#include "ops/decoder_layer/cuda_epilogues.cuh"

#include <algorithm>

namespace llaisys::ops::cuda {

constexpr int kRopeKvStoreThreads = 512; // upper bound
constexpr int kMaxPairs = 512;           // per head

// Eight adjacent values from i on, 16-byte aligned; zeros when data is null.
__device__ __forceinline__ void load_8(const Reals &from, int64_t i, float (&to)[8]) {
#pragma unroll
    for (int j = 0; j < 8; ++j) {
        to[j] = 0.0f;
    }
    if (from.data == nullptr) {
        return;
    }
    if (from.dtype == LLAISYS_DTYPE_F32) {
        const auto *at =
            reinterpret_cast<const float4 *>(static_cast<const float *>(from.data) + i);
        const float4 low = at[0], high = at[1];
        to[0] = low.x, to[1] = low.y, to[2] = low.z, to[3] = low.w;
        to[4] = high.x, to[5] = high.y, to[6] = high.z, to[7] = high.w;
        return;
    }
    const uint4 bits =
        *reinterpret_cast<const uint4 *>(static_cast<const uint16_t *>(from.data) + i);
    const bool is_bf16 = from.dtype == LLAISYS_DTYPE_BF16;
#pragma unroll
    for (int j = 0; j < 8; ++j) {
        to[j] = is_bf16 ? to_float(reinterpret_cast<const bf16 *>(&bits)[j])
                        : to_float(reinterpret_cast<const f16 *>(&bits)[j]);
    }
}

// One block per row.
template <typename T>
__global__ void __launch_bounds__(kRopeKvStoreThreads)
    rope_kv_store_kernel(RopeKvStore<T> pairs, const T *qkv, int64_t ld) {
    constexpr int kPairs = 8;
    __shared__ float2 angles[kMaxPairs];
    grid_dependency_wait();
    launch_dependents();
    const int row = blockIdx.x;
    const int half = pairs.s.d / 2;
    const int atoms_per_head = half / kPairs;
    const int n_items = pairs.s.heads() * atoms_per_head;
    __align__(16) T low[kPairs], high[kPairs];
    float low_bias[kPairs], high_bias[kPairs];
    T *to = nullptr;
    const auto load = [&](int item) {
        const int head = item / atoms_per_head;
        const int pair = item % atoms_per_head * kPairs;
        const int section = pairs.s.section_of(head);
        const T *from = qkv + row * ld + head * pairs.s.d + pair;
        *reinterpret_cast<uint4 *>(low) = *reinterpret_cast<const uint4 *>(from);
        *reinterpret_cast<uint4 *>(high) = *reinterpret_cast<const uint4 *>(from + half);
        const int at = (head - pairs.s.first_head(section)) * pairs.s.d + pair;
        const Reals bias = pairs.s.bias_of(section);
        load_8(bias, at, low_bias);
        load_8(bias, at + half, high_bias);
        to = pairs.destination(head, pair, row, section == 0 ? 0 : pairs.s.slots[row]);
    };
    if (threadIdx.x < n_items) {
        load(threadIdx.x);
    }
    for (int i = threadIdx.x; i < half; i += blockDim.x) {
        pairs.sincos(i, row, &angles[i].x, &angles[i].y);
    }
    __syncthreads();
    for (int i = threadIdx.x; i < n_items; i += blockDim.x) {
        if (i >= blockDim.x) {
            load(i);
        }
        if (to == nullptr) {
            continue;
        }
        const int head = i / atoms_per_head;
        const int pair = i % atoms_per_head * kPairs;
#pragma unroll
        for (int j = 0; j < kPairs; ++j) {
            float x = to_float(low[j]) + low_bias[j];
            float y = to_float(high[j]) + high_bias[j];
            const float2 angle = angles[pair + j];
            pairs.rotate(head, angle.x, angle.y, &x, &y);
            low[j] = from_float<T>(x);
            high[j] = from_float<T>(y);
        }
        *reinterpret_cast<uint4 *>(to) = *reinterpret_cast<const uint4 *>(low);
        *reinterpret_cast<uint4 *>(to + half) = *reinterpret_cast<const uint4 *>(high);
    }
}

// qkv: n rows, row stride ld.
template <typename T>
void rope_kv_store(const device::CudaStream &stream, const RopeKvStore<T> &pairs, const T *qkv,
                   int64_t ld, int64_t n) {
    const int64_t items = int64_t(pairs.s.heads()) * pairs.s.d / 16;
    const int64_t threads = std::min<int64_t>(kRopeKvStoreThreads, (items + 31) / 32 * 32);
    launch(stream, rope_kv_store_kernel<T>, unsigned(n), unsigned(threads), 0, true, pairs, qkv,
           ld);
}

} // namespace llaisys::ops::cuda
