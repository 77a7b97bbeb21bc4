// Experts of a few tokens: one warp per output, without sorting. Each pair reads its expert's
// weights; an expert that two of the tokens select is read from DRAM once and from L2 again. Bound:
// DRAM bandwidth.
//
//   moe_gate_up_gemv_kernel   grid (di / 8, pairs): hidden[pair] = activation(gate, up)
//   moe_down_gemv_kernel      grid (hs / 8, tokens): out[t] (+)= sum over j of weight * down;
//                             loads weights while the first kernel ends
//
// hs and di are multiples of 8; pointers are 16-byte aligned.
#pragma once

#include "ops/moe/cuda_args.cuh"

namespace llaisys::ops::cuda {

constexpr int kMoeGemvTokens = 4; // most tokens
constexpr int kMoeGemvWarps = 8;
constexpr int kMoeGemvThreads = kMoeGemvWarps * kWarpSize;

template <typename T>
__global__ void __launch_bounds__(kMoeGemvThreads) moe_gate_up_gemv_kernel(MoeArgs<T> args) {
    const int lane = threadIdx.x % kWarpSize;
    const int output = int(blockIdx.x) * kMoeGemvWarps + int(threadIdx.x) / kWarpSize;
    const int pair = int(blockIdx.y);
    grid_dependency_wait();
    launch_dependents(); // not earlier: moe_down_gemv_kernel reads `experts` before it waits
    if (output >= args.di) {
        return;
    }
    const int expert = args.experts[pair];
    const int64_t row = int64_t(expert) * args.di + output;
    const auto *x = reinterpret_cast<const uint4 *>(args.x + pair / args.top_k * args.ldx);
    const auto *gate = reinterpret_cast<const uint4 *>(args.gate + row * args.hs);
    const auto *up = reinterpret_cast<const uint4 *>(args.up + row * args.hs);
    const int units = args.hs / 8;
    constexpr int kAtOnce = 8;
    float gate_sum = 0, up_sum = 0;
    for (int first = lane; first < units; first += kAtOnce * kWarpSize) {
        uint4 g[kAtOnce], u[kAtOnce];
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
            const int inside = min(first + i * kWarpSize,
                                   units - 1); // loads without a branch; x is 0 past the end
            g[i] = __ldcs(gate + inside);
            u[i] = __ldcs(up + inside);
        }
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
            const int at = first + i * kWarpSize;
            const uint4 values = at < units ? x[at] : make_uint4(0, 0, 0, 0);
            gate_sum = dot_8<T>(g[i], values, gate_sum);
            up_sum = dot_8<T>(u[i], values, up_sum);
        }
    }
    gate_sum = warp_sum(gate_sum);
    up_sum = warp_sum(up_sum);
    if (lane == 0) {
        gate_sum += args.gate_bias.data != nullptr ? args.gate_bias.load(row) : 0.0f;
        up_sum += args.up_bias.data != nullptr ? args.up_bias.load(row) : 0.0f;
        args.hidden[int64_t(pair) * args.di + output] =
            from_float<T>(moe_activation(gate_sum, up_sum, args.limit, args.alpha));
    }
}

template <typename T>
__global__ void __launch_bounds__(kMoeGemvThreads) moe_down_gemv_kernel(MoeArgs<T> args) {
    launch_dependents();
    const int lane = threadIdx.x % kWarpSize;
    const int output = int(blockIdx.x) * kMoeGemvWarps + int(threadIdx.x) / kWarpSize;
    const int token = int(blockIdx.y);
    if (output >= args.hs) {
        return;
    }
    const int units = args.di / 8; // of one expert
    constexpr int kAtOnce = 12;
    const int all = args.top_k * units;
    const int32_t *experts = args.experts + token * args.top_k;
    const float *weights = args.weights + token * args.top_k;
    const auto *hidden =
        reinterpret_cast<const uint4 *>(args.hidden + int64_t(token) * args.top_k * args.di);
    uint4 w[kAtOnce];
    const auto load = [&](int first) {
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
            const int at = min(first + i * kWarpSize, all - 1);
            const int j = at / units;
            const int64_t row = int64_t(__ldcg(experts + j)) * args.hs + output;
            w[i] = __ldcs(reinterpret_cast<const uint4 *>(args.down + row * args.di) +
                          (at - j * units));
        }
    };
    load(lane);
    grid_dependency_wait();
    float sum = 0;
    for (int first = lane; first < all; first += kAtOnce * kWarpSize) {
        if (first != lane) {
            load(first);
        }
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
            const int at = first + i * kWarpSize;
            if (at < all) {
                sum += weights[at / units] * dot_8<T>(w[i], hidden[at], 0.0f);
            }
        }
    }
    sum = warp_sum(sum);
    if (lane == 0) {
        for (int j = 0; j < args.top_k && args.down_bias.data != nullptr; ++j) {
            sum += weights[j] * args.down_bias.load(int64_t(experts[j]) * args.hs + output);
        }
        const int64_t at = token * args.ldo + output;
        args.out.store(at, args.adds ? args.out.load(at) + sum : sum);
    }
}

template <typename T> void moe_mlp_gemv(const device::CudaStream &stream, const MoeArgs<T> &args) {
    const dim3 inner(ceil_div(args.di, kMoeGemvWarps), unsigned(args.n * args.top_k));
    launch(stream, moe_gate_up_gemv_kernel<T>, inner, kMoeGemvThreads, 0, true, args);
    const dim3 outer(ceil_div(args.hs, kMoeGemvWarps), unsigned(args.n));
    launch(stream, moe_down_gemv_kernel<T>, outer, kMoeGemvThreads, 0, true, args);
}

} // namespace llaisys::ops::cuda
