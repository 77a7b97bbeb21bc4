// Routing of tokens to experts, one warp per token. Latency-bound.
//
//   route_kernel        the logits are in memory
//   norm_route_kernel   RMS norm, router product and routing of a token by a cluster of 8 blocks;
//                       the weights of the router are loaded before grid_dependency_wait()
#pragma once

#include "ops/cuda/cluster.cuh"
#include "ops/cuda/dispatch.cuh"
#include "ops/moe/cuda_args.cuh"
#include "ops/moe/op.hpp"

namespace llaisys::ops::cuda {

constexpr int kRouteWarps = 4;
constexpr int kRouteMaxGroups = 32;

struct RouteEntry {
    float value; // never NaN
    int index;
};

// The largest value of the warp, the lowest index on a tie.
__device__ __forceinline__ RouteEntry warp_best(const RouteEntry &own) {
    const uint32_t bits = __float_as_uint(own.value + 0.0f);           // one zero
    const uint32_t key = bits >> 31 != 0 ? ~bits : bits | 0x80000000u; // in the order of the values
    const uint32_t best = __reduce_max_sync(kFullMask, key);
    const int index =
        int(__reduce_min_sync(kFullMask, key == best ? uint32_t(own.index) : UINT32_MAX));
    const uint32_t value = best >> 31 != 0 ? best & 0x7fffffffu : ~best;
    return {__uint_as_float(value), index};
}

// Selects k experts for one row of logits by one warp. PerLane: experts of a lane; expert e belongs
// to lane e % 32. Excluded and selected experts have the index INT32_MAX. scratch: shared memory of
// the warp, PerLane * 32 values.
template <int PerLane>
__device__ __forceinline__ void route_row(int32_t *experts, float *weights, const float *row,
                                          const float *bias, int n_experts, int k,
                                          const MoeRouting &routing, float *scratch) {
    const int lane = threadIdx.x % kWarpSize;
    float scores[PerLane], choice[PerLane];
    int index[PerLane];
    float largest = -INFINITY;
#pragma unroll
    for (int i = 0; i < PerLane; ++i) {
        const int e = i * kWarpSize + lane;
        index[i] = e < n_experts ? e : INT32_MAX;
        scores[i] = e < n_experts ? row[e] : -INFINITY;
        largest = fmaxf(largest, scores[i]); // ignores NaN
    }
    if (routing.is_sigmoid) {
#pragma unroll
        for (int i = 0; i < PerLane; ++i) {
            scores[i] = 1.0f / (1.0f + expf(-scores[i]));
        }
    } else {
        largest = warp_max(largest);
        float sum = 0;
#pragma unroll
        for (int i = 0; i < PerLane; ++i) {
            scores[i] = largest == -INFINITY ? 0.0f : expf(scores[i] - largest);
            sum += scores[i] == scores[i] ? scores[i] : 0.0f;
        }
        sum = warp_sum(sum);
#pragma unroll
        for (int i = 0; i < PerLane; ++i) {
            scores[i] = sum > 0 ? scores[i] / sum : 0.0f;
        }
    }
#pragma unroll
    for (int i = 0; i < PerLane; ++i) {
        scores[i] = scores[i] == scores[i] ? scores[i] : -INFINITY;
        choice[i] =
            index[i] < n_experts ? scores[i] + (bias != nullptr ? bias[index[i]] : 0.0f) : 0.0f;
    }
    if (routing.n_top_groups < routing.n_groups) {
        const int width = n_experts / routing.n_groups;
#pragma unroll
        for (int i = 0; i < PerLane; ++i) {
            scratch[i * kWarpSize + lane] = choice[i];
        }
        __syncwarp();
        RouteEntry group{-INFINITY, INT32_MAX};
        if (lane < routing.n_groups) {
            float second = -INFINITY;
            for (int e = lane * width; e < (lane + 1) * width; ++e) {
                const float value = scratch[e];
                if (value > group.value) {
                    second = group.value;
                    group.value = value;
                } else if (value > second) {
                    second = value;
                }
            }
            group.value += bias != nullptr && width > 1 ? second : 0.0f;
            group.index = lane;
        }
        unsigned kept = 0;
        for (int i = 0; i < routing.n_top_groups; ++i) {
            const RouteEntry best = warp_best(group);
            kept |= 1u << best.index;
            if (best.index == lane) {
                group = {-INFINITY, INT32_MAX};
            }
        }
#pragma unroll
        for (int i = 0; i < PerLane; ++i) {
            if (index[i] < n_experts && (kept >> (index[i] / width) & 1) == 0) {
                index[i] = INT32_MAX;
            }
        }
    }
    float sum = 0, weight = 0; // lane j holds the weight of choice j below 32
    for (int j = 0; j < k; ++j) {
        RouteEntry best{-INFINITY, INT32_MAX};
        float score = 0;
#pragma unroll
        for (int i = 0; i < PerLane; ++i) { // ascending experts: the first of equals stays
            if (index[i] != INT32_MAX && (best.index == INT32_MAX || choice[i] > best.value)) {
                best = {choice[i], index[i]};
            }
        }
        best = warp_best(best);
#pragma unroll
        for (int i = 0; i < PerLane; ++i) {
            if (index[i] == best.index) {
                score = scores[i] > -INFINITY ? scores[i] : 0.0f;
                index[i] = INT32_MAX;
            }
        }
        score = __shfl_sync(kFullMask, score, best.index % kWarpSize);
        sum += score;
        if (lane == 0) {
            experts[j] = best.index;
            if (j >= kWarpSize) {
                weights[j] = score;
            }
        }
        weight = lane == j ? score : weight;
    }
    const float factor = routing.is_renormalised ? routing.scale / (sum + 1e-20f) : routing.scale;
    if (lane < k) {
        weights[lane] = weight * factor;
    }
    if (lane == 0) { // more than 32 experts of a token
        for (int j = kWarpSize; j < k; ++j) {
            weights[j] *= factor;
        }
    }
}

template <int PerLane>
__global__ void __launch_bounds__(kRouteWarps *kWarpSize)
    route_kernel(int32_t *experts, float *weights, const float *logits, const float *bias, int n,
                 int n_experts, int k, MoeRouting routing) {
    __shared__ float scratch[kRouteWarps][PerLane * kWarpSize];
    launch_dependents();
    grid_dependency_wait();
    const int warp = threadIdx.x / kWarpSize;
    const int64_t token = int64_t(blockIdx.x) * kRouteWarps + warp;
    if (token < n) {
        route_row<PerLane>(experts + token * k, weights + token * k, logits + token * n_experts,
                           bias, n_experts, k, routing, scratch[warp]);
    }
}

// -- With norm and router -------------------------------------------------------------------------

constexpr int kNormRouteTokens = 32; // most
constexpr unsigned kNormRouteCluster = 8;
constexpr int kNormRouteWarps = 8;
constexpr int kNormRouteThreads = kNormRouteWarps * kWarpSize;
constexpr int kNormRouteVectors = 4; // float4 values of the row per thread
constexpr int kNormRouteMaxHidden = kNormRouteVectors * 4 * kNormRouteThreads;

template <typename T> struct NormRoute {
    const float *residual; // [n, hs]
    int64_t ld_residual;
    const float *norm_weight; // [hs]
    float epsilon;
    T *normed; // [n, hs]
    int64_t ld_normed;
    const T *router;      // [n_experts, hs]
    Reals router_bias;    // [n_experts]; data null: none
    const float *bias;    // [n_experts], of the selection; null: none
    int32_t *experts;     // [n, k]
    float *weights;       // [n, k]
    int n_experts, k, hs; // hs: a multiple of 8
    MoeRouting routing;
};

// Grid (8, tokens). Each block normalizes the row and multiplies it by an eighth of the router's
// rows; block 0 of the cluster receives the logits.
template <typename T, int PerLane>
__global__ void __launch_bounds__(kNormRouteThreads) norm_route_kernel(NormRoute<T> args) {
#if __CUDA_ARCH__ >= 900
    __shared__ __align__(16) T row[kNormRouteMaxHidden];
    __shared__ float logits[PerLane * kWarpSize], scratch[PerLane * kWarpSize];
    __shared__ float sums[kNormRouteWarps];
    launch_dependents();
    barrier_cluster_arrive_relaxed(); // block 0 has started before others store to it
    const int lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize;
    const int rank = int(blockIdx.x), token = int(blockIdx.y);
    constexpr int kOfCluster = int(kNormRouteCluster) * kNormRouteWarps;
    const int each = (args.n_experts + kOfCluster - 1) / kOfCluster; // experts of a warp
    const int first = (rank * kNormRouteWarps + warp) * each;
    const int count = min(each, args.n_experts - first); // may be negative
    const int units = args.hs / 8, chunks = (units + kWarpSize - 1) / kWarpSize;
    const int items = count * chunks; // of 32 units of 8 values
    constexpr int kAtOnce = 16;
    uint4 w[kAtOnce];
    const auto load = [&](int begin) {
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
            const int item = begin + i, unit = item % chunks * kWarpSize + lane;
            w[i] = make_uint4(0, 0, 0, 0);
            if (item < items && unit < units) {
                w[i] = reinterpret_cast<const uint4 *>(
                    args.router + int64_t(first + item / chunks) * args.hs)[unit];
            }
        }
    };
    load(0);
    float4 scales[kNormRouteVectors], values[kNormRouteVectors];
    const int vectors = args.hs / 4;
#pragma unroll
    for (int j = 0; j < kNormRouteVectors; ++j) {
        const int i = int(threadIdx.x) + j * kNormRouteThreads;
        scales[j] = load_or_zero(reinterpret_cast<const float4 *>(args.norm_weight), i, vectors);
    }
    grid_dependency_wait();
    const auto *in = reinterpret_cast<const float4 *>(args.residual + token * args.ld_residual);
    float squares = 0;
#pragma unroll
    for (int j = 0; j < kNormRouteVectors; ++j) {
        const int i = int(threadIdx.x) + j * kNormRouteThreads;
        values[j] = load_or_zero(in, i, vectors);
    }
#pragma unroll
    for (int j = 0; j < kNormRouteVectors; ++j) {
        squares += sum_of_squares(values[j]);
    }
    squares = block_sum<kNormRouteThreads>(squares, sums);
    const float factor = 1.0f / sqrtf(squares / float(args.hs) + args.epsilon);
    const int own = (vectors + int(kNormRouteCluster) - 1) / int(kNormRouteCluster);
#pragma unroll
    for (int j = 0; j < kNormRouteVectors; ++j) {
        const int i = int(threadIdx.x) + j * kNormRouteThreads;
        const uint2 bits = normed_pairs<T>(values[j], factor, scales[j]);
        if (i < vectors) {
            reinterpret_cast<uint2 *>(row)[i] = bits;
        }
        if (i < vectors && i / own == rank) {
            reinterpret_cast<uint2 *>(args.normed + token * args.ld_normed)[i] = bits;
        }
    }
    __syncthreads();
    barrier_cluster_wait();
    const uint32_t to = mapa(smem_address(logits), 0);
    float sum = 0;
    for (int begin = 0; begin < items; begin += kAtOnce) {
        if (begin > 0) {
            load(begin);
        }
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
            const int item = begin + i, unit = item % chunks * kWarpSize + lane;
            if (item >= items) {
                break;
            }
            if (unit < units) {
                sum = dot_8<T>(w[i], reinterpret_cast<const uint4 *>(row)[unit], sum);
            }
            if (item % chunks == chunks - 1) {
                const int expert = first + item / chunks;
                sum = warp_sum(sum);
                if (lane == 0) {
                    sum += args.router_bias.data != nullptr ? args.router_bias.load(expert) : 0.0f;
                    st_shared_cluster(to + uint32_t(expert) * 4, sum);
                }
                sum = 0;
            }
        }
    }
    barrier_cluster_arrive();
    barrier_cluster_wait();
    if (rank == 0 && warp == 0) {
        route_row<PerLane>(args.experts + int64_t(token) * args.k,
                           args.weights + int64_t(token) * args.k, logits, args.bias,
                           args.n_experts, args.k, args.routing, scratch);
    }
#endif
}

// Calls use(std::integral_constant) with enough experts per lane.
template <typename Use> void dispatch_route(int n_experts, const Use &use) {
    int per_lane = 1;
    while (per_lane * kWarpSize < n_experts) {
        per_lane *= 2;
    }
    dispatch_int<1, 2, 4, 8, 16>(per_lane, use);
}

} // namespace llaisys::ops::cuda
