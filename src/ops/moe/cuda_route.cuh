// Routing of tokens to experts, one warp per token. Latency-bound.
#pragma once

#include "ops/cuda/common.cuh"
#include "ops/moe/op.hpp"

namespace llaisys::ops::cuda {

constexpr int kRouteWarps = 4;
constexpr int kRouteMaxGroups = 32;

struct RouteEntry {
    float value; // never NaN
    int index;
};

// The largest value of the warp, the lowest index on a tie.
__device__ __forceinline__ RouteEntry warp_best(RouteEntry best) {
    for (int step = 16; step > 0; step >>= 1) {
        const float value = __shfl_xor_sync(kFullMask, best.value, step);
        const int index = __shfl_xor_sync(kFullMask, best.index, step);
        if (value > best.value || (value == best.value && index < best.index)) {
            best = {value, index};
        }
    }
    return best;
}

// PerLane: experts of a lane; expert e belongs to lane e % 32. Excluded and selected experts have
// the index INT32_MAX.
template <int PerLane>
__global__ void __launch_bounds__(kRouteWarps *kWarpSize)
    route_kernel(int32_t *experts, float *weights, const float *logits, const float *bias, int n,
                 int n_experts, int k, MoeRouting routing) {
    __shared__ float shared_choice[kRouteWarps][PerLane * kWarpSize];
    launch_dependents();
    grid_dependency_wait();
    const int lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize;
    const int token = int(blockIdx.x) * kRouteWarps + warp;
    if (token >= n) {
        return;
    }
    const float *row = logits + int64_t(token) * n_experts;
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
            shared_choice[warp][i * kWarpSize + lane] = choice[i];
        }
        __syncwarp();
        RouteEntry group{-INFINITY, INT32_MAX};
        if (lane < routing.n_groups) {
            float second = -INFINITY;
            for (int e = lane * width; e < (lane + 1) * width; ++e) {
                const float value = shared_choice[warp][e];
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
            experts[int64_t(token) * k + j] = best.index;
            weights[int64_t(token) * k + j] = score;
        }
        weight = lane == j ? score : weight;
    }
    const float factor = routing.is_renormalised ? routing.scale / (sum + 1e-20f) : routing.scale;
    if (lane < k) {
        weights[int64_t(token) * k + lane] = weight * factor;
    }
    if (lane == 0) { // more than 32 experts of a token
        for (int j = kWarpSize; j < k; ++j) {
            weights[int64_t(token) * k + j] *= factor;
        }
    }
}

// The kernel with enough experts per lane.
inline auto route_kernel_of(int n_experts) {
    return n_experts <= 32    ? route_kernel<1>
           : n_experts <= 64  ? route_kernel<2>
           : n_experts <= 128 ? route_kernel<4>
           : n_experts <= 256 ? route_kernel<8>
                              : route_kernel<16>;
}

} // namespace llaisys::ops::cuda
