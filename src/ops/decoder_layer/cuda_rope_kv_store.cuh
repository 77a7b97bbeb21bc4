// Biases, QK norm, RoPE and KV store after a GEMM of q, k and v. qkv [n, (heads + 2 kv_heads) * d];
// q is updated in place.
//
// 8 pairs per thread; their loads overlap with the sine and cosine of the row. Memory-bound: each
// value is read and written once. 8-bit caches: the threads of a head reduce its largest magnitude.
#pragma once

#include "ops/cuda/kv_bytes.cuh"
#include "ops/decoder_layer/cuda_epilogues.cuh"

#include <algorithm>
#include <type_traits>

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

// RMS norms of each query and key head before RoPE (QK norm), [d] each. data null: none.
struct QkNorm {
    Reals q, k;
    float epsilon;
};

// Threads of a head: 8 pairs each.
constexpr int kPairsPerThread = 8;
inline int threads_per_head(int64_t head_dim) { return int(head_dim / (2 * kPairsPerThread)); }

// Whether a reduction over a head (QK norm, scale of 8 bits) is one within an aligned group of lanes.
inline bool can_reduce_head(int64_t head_dim) {
    const int threads = threads_per_head(head_dim);
    return head_dim % (2 * kPairsPerThread) == 0 && threads <= kWarpSize &&
           (threads & (threads - 1)) == 0;
}

// Lanes of the head of this thread.
__device__ __forceinline__ unsigned head_lanes(int head_threads) {
    const int lane = threadIdx.x % kWarpSize;
    return (head_threads == kWarpSize ? kFullMask : (1u << head_threads) - 1u)
           << (lane / head_threads * head_threads);
}

// 8-bit caches; unused by 16-bit ones. d is a multiple of 16.
struct KvByteCaches {
    KvBytes k, v;
};

// Quantises and stores the 8 pairs of a thread: x from `pair` on and y from d / 2 + `pair` on.
template <typename Format>
__device__ __forceinline__ void
store_quantised(const KvBytes &cache, int64_t slot, int head, int pair, int head_threads,
                const float (&x)[kPairsPerThread], const float (&y)[kPairsPerThread]) {
    uint32_t largest = 0;
#pragma unroll
    for (int j = 0; j < kPairsPerThread; ++j) {
        largest = max(largest, max(magnitude_bits(x[j]), magnitude_bits(y[j])));
    }
    const unsigned lanes = head_lanes(head_threads);
    for (int step = head_threads / 2; step > 0; step /= 2) {
        largest = max(largest, __shfl_xor_sync(lanes, largest, step));
    }
    const RowScale scale = row_scale<Format>(largest);
    __align__(8) uint8_t low[kPairsPerThread], high[kPairsPerThread];
#pragma unroll
    for (int j = 0; j < kPairsPerThread; ++j) {
        low[j] = quantise<Format>(x[j], scale.factor);
        high[j] = quantise<Format>(y[j], scale.factor);
    }
    uint8_t *to = cache.values + cache.row_at(slot, head) + pair;
    *reinterpret_cast<uint2 *>(to) = *reinterpret_cast<const uint2 *>(low);
    *reinterpret_cast<uint2 *>(to + cache.d / 2) = *reinterpret_cast<const uint2 *>(high);
    if (pair == 0) {
        *reinterpret_cast<float *>(cache.scale_at(slot, head)) = scale.scale;
    }
}

// One block per row. Norms: with QK norm. Format: of 8-bit caches; void: the caches are of type T.
template <typename T, bool Norms, typename Format>
__global__ void __launch_bounds__(kRopeKvStoreThreads)
    rope_kv_store_kernel(RopeKvStore<T> pairs, KvByteCaches bytes, QkNorm norm, const T *qkv,
                         int64_t ld) {
    constexpr int kPairs = kPairsPerThread;
    __shared__ float2 angles[kMaxPairs];
    __shared__ __align__(16) float weights[Norms ? 4 * kMaxPairs : 4]; // of the norms: [2, d]
    const int row = blockIdx.x;
    const int half = pairs.s.d / 2;
    const int head_threads = half / kPairs;
    const int n_items = pairs.s.heads() * head_threads;
    __align__(16) T low[kPairs], high[kPairs];
    float low_bias[kPairs], high_bias[kPairs];
    T *to = nullptr;
    const auto load_values = [&](int item) {
        const int head = item / head_threads;
        const int pair = item % head_threads * kPairs;
        const int section = pairs.s.section_of(head);
        const T *from = qkv + row * ld + head * pairs.s.d + pair;
        *reinterpret_cast<uint4 *>(low) = *reinterpret_cast<const uint4 *>(from);
        *reinterpret_cast<uint4 *>(high) = *reinterpret_cast<const uint4 *>(from + half);
        to = pairs.destination(head, pair, row, section == 0 ? 0 : pairs.s.slots[row]);
    };
    const auto load_biases = [&](int item) {
        const int head = item / head_threads;
        const int pair = item % head_threads * kPairs;
        const int section = pairs.s.section_of(head);
        const int at = (head - pairs.s.first_head(section)) * pairs.s.d + pair;
        const Reals bias = pairs.s.bias_of(section);
        load_8(bias, at, low_bias);
        load_8(bias, at + half, high_bias);
    };
    const auto compute_angles = [&] {
        for (int i = threadIdx.x; i < half; i += blockDim.x) {
            pairs.sincos(i, row, &angles[i].x, &angles[i].y);
        }
    };
    // This kernel and the start of attention are latency-bound: everything that the GEMM does not write
    // comes before the wait. Positions were written before the GEMM started.
    launch_dependents();
    for (int i = threadIdx.x; Norms && i < 4 * half; i += blockDim.x) {
        weights[i] = i < 2 * half ? norm.q.load(i) : norm.k.load(i - 2 * half);
    }
    if (!Norms && threadIdx.x < n_items) {
        load_biases(threadIdx.x);
    }
    compute_angles();
    __syncthreads();
    grid_dependency_wait();
    if (threadIdx.x < n_items) {
        load_values(threadIdx.x);
    }
    for (int i = threadIdx.x; i < n_items; i += blockDim.x) {
        if (i >= blockDim.x) {
            load_values(i);
        }
        if (Norms || i >= blockDim.x) {
            load_biases(i);
        }
        if (to == nullptr) { // the same for all threads of a head
            continue;
        }
        const int head = i / head_threads;
        const int pair = i % head_threads * kPairs;
        float x[kPairs], y[kPairs];
#pragma unroll
        for (int j = 0; j < kPairs; ++j) {
            x[j] = to_float(low[j]) + low_bias[j];
            y[j] = to_float(high[j]) + high_bias[j];
        }
        if (Norms && pairs.s.section_of(head) < 2) {
            const unsigned group = head_lanes(head_threads);
            float sum = 0;
#pragma unroll
            for (int j = 0; j < kPairs; ++j) {
                sum += x[j] * x[j] + y[j] * y[j];
            }
            for (int step = head_threads / 2; step > 0; step /= 2) {
                sum += __shfl_xor_sync(group, sum, step);
            }
            const float factor = 1.0f / sqrtf(sum / float(pairs.s.d) + norm.epsilon);
            const auto *low_scale = reinterpret_cast<const float4 *>(
                weights + pairs.s.section_of(head) * pairs.s.d + pair);
            const auto *high_scale = low_scale + half / 4;
            const auto apply = [&](float *values, const float4 &scale) {
                values[0] *= factor * scale.x;
                values[1] *= factor * scale.y;
                values[2] *= factor * scale.z;
                values[3] *= factor * scale.w;
            };
#pragma unroll
            for (int j = 0; j < kPairs / 4; ++j) {
                apply(x + 4 * j, low_scale[j]);
                apply(y + 4 * j, high_scale[j]);
            }
        }
#pragma unroll
        for (int j = 0; j < kPairs; ++j) {
            const float2 angle = angles[pair + j];
            pairs.rotate(head, angle.x, angle.y, &x[j], &y[j]);
        }
        if constexpr (!std::is_void_v<Format>) {
            const int section = pairs.s.section_of(head);
            if (section > 0) {
                store_quantised<Format>(section == 1 ? bytes.k : bytes.v, pairs.s.slots[row],
                                        head - pairs.s.first_head(section), pair, head_threads, x,
                                        y);
                continue;
            }
        }
#pragma unroll
        for (int j = 0; j < kPairs; ++j) {
            low[j] = from_float<T>(x[j]);
            high[j] = from_float<T>(y[j]);
        }
        *reinterpret_cast<uint4 *>(to) = *reinterpret_cast<const uint4 *>(low);
        *reinterpret_cast<uint4 *>(to + half) = *reinterpret_cast<const uint4 *>(high);
    }
}

// qkv: n rows, row stride ld. norm: null data for none; otherwise, and with a Format,
// can_reduce_head(d).
template <typename T, typename Format = void>
void rope_kv_store(const device::CudaStream &stream, const RopeKvStore<T> &pairs,
                   const QkNorm &norm, const T *qkv, int64_t ld, int64_t n,
                   const KvByteCaches &bytes = {}) {
    const int64_t items = int64_t(pairs.s.heads()) * threads_per_head(pairs.s.d);
    const int64_t threads = std::min<int64_t>(kRopeKvStoreThreads, (items + 31) / 32 * 32);
    const auto kernel = norm.q.data != nullptr ? rope_kv_store_kernel<T, true, Format>
                                               : rope_kv_store_kernel<T, false, Format>;
    launch(stream, kernel, unsigned(n), unsigned(threads), 0, true, pairs, bytes, norm, qkv, ld);
}

} // namespace llaisys::ops::cuda
