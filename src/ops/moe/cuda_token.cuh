// RMS norm, router, routing and the selected experts of one token in one kernel: compute capability
// 9, 16-bit weights. Bound: DRAM bandwidth.
//
// One block per SM, all resident at once. Blocks exchange values through 64-bit words in global
// memory, a value and a tag, so that a word is its own flag and no fence is needed:
//   1  every block normalizes the row and computes the logits of its experts of the router
//   2  every block reads all logits and selects the experts
//   3  every block computes its part of the hidden values, activation(gate, up)
//   4  every block reads all hidden values and computes its part of the outputs
//
// Weights pass through a pipeline per warp as in gemv_sm90.cuh. A unit is two weight rows with the
// same input: gate and up of a hidden value, or down of one expert and two adjacent outputs. The
// pipeline continues from step 3 to step 4, so that DRAM is busy during the exchange. Sums are
// added in a fixed order. The last block to read the words sets them to zero for the next launch.
#pragma once

#include "ops/cuda/gemv_sm90.cuh"
#include "ops/moe/cuda_route.cuh"

namespace llaisys::ops::cuda {

constexpr int kTokenWarps = 16;
constexpr int kTokenThreads = kTokenWarps * kWarpSize;
constexpr int kTokenVectors = 2; // float4 values of the row per thread
constexpr int kTokenMaxHidden = kTokenVectors * 4 * kTokenThreads; // values
constexpr int kTokenRouterRows = 4;                                // of a block, at most
constexpr int kTokenMaxK = 32;                                     // experts of a token

// Partition of the work, and shared memory layout: stages, x, hidden values, own hidden values,
// sums, mbarriers.
struct MoeTokenConfig {
    int stages;
    int up_block, up_blocks;     // values of a stage, stages of a unit of gate and up
    int down_block, down_blocks; // the same for down
    uint32_t stage_bytes, x_at, hidden_at, own_at, sums_at, barriers_at, bytes;
};

template <typename T> struct MoeToken {
    MoeArgs<T> experts;       // of one token; out: the residual stream, f32
    const float *norm_weight; // [hs]
    float epsilon;
    T *normed;         // [hs]; null: not needed
    const T *router;   // [n_experts, hs]
    Reals router_bias; // [n_experts]; data null: none
    const float *bias; // [n_experts], of the selection; null: none
    MoeRouting routing;
    uint32_t *readers; // blocks that have read all words; zero between launches
    uint64_t *logits;  // [n_experts]; zero between launches
    uint64_t *hidden;  // [top_k * di / 2], two values each; zero between launches
    MoeTokenConfig s;
};

constexpr uint64_t kTokenTag = uint64_t(1) << 32;
__device__ __forceinline__ void st_relaxed_gpu(uint64_t *to, uint64_t value) {
    asm volatile("st.relaxed.gpu.global.b64 [%0], %1;" ::"l"(to), "l"(value) : "memory");
}
__device__ __forceinline__ uint64_t ld_relaxed_gpu(const uint64_t *from) {
    uint64_t value;
    asm volatile("ld.relaxed.gpu.global.b64 %0, [%1];" : "=l"(value) : "l"(from) : "memory");
    return value;
}

// Offset of value i of a row of n values as load_x_vector<T, true> reads it.
__device__ __forceinline__ int x_offset(int i, int n) {
    return (i & 4) * (n / 8) + i / 8 * 4 + i % 4;
}

template <typename T, int PerLane>
__global__ void __launch_bounds__(kTokenThreads, 2) moe_token_kernel(MoeToken<T> args) {
#if __CUDA_ARCH__ >= 900
    extern __shared__ __align__(128) unsigned char shared[];
    __shared__ float partial[kTokenWarps][kTokenRouterRows + 1]; // logits of a warp, squares
    __shared__ float route_logits[PerLane * kWarpSize], route_scratch[PerLane * kWarpSize];
    __shared__ int32_t selected[kTokenMaxK];
    __shared__ float weights[kTokenMaxK];
    __shared__ uint64_t router_barrier;
    __shared__ bool is_last;
    const MoeArgs<T> &mlp = args.experts;
    const MoeTokenConfig &s = args.s;
    const int lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize;
    const int block = int(blockIdx.x), grid = int(gridDim.x);
    const int hs = mlp.hs, di = mlp.di, top_k = mlp.top_k, n_experts = mlp.n_experts;
    const int n_hidden = top_k * di;
    const uint32_t full = smem_address(shared) + s.barriers_at + uint32_t(warp * s.stages) * 8;

    // -- Norm and router: expert block + i * grid -------------------------------------------------
    const int router_rows = (n_experts - block + grid - 1) / grid; // 0 or negative: none
    if (lane == 0) {
        for (int i = 0; i < s.stages; ++i) {
            mbarrier_init(full + uint32_t(i) * 8, 1);
        }
        if (warp == 0) {
            mbarrier_init(smem_address(&router_barrier), 1);
        }
        fence_mbarrier_init();
    }
    if (threadIdx.x == 0 && router_rows > 0) { // into the pipeline's buffer
        const uint32_t bytes = uint32_t(hs) * 2;
        mbarrier_arrive_expect_tx(smem_address(&router_barrier), uint32_t(router_rows) * bytes);
        const uint64_t policy = l2_evict_first_policy();
        for (int i = 0; i < router_rows; ++i) {
            cp_async_bulk(smem_address(shared) + uint32_t(i) * bytes,
                          args.router + int64_t(block + i * grid) * hs, bytes,
                          smem_address(&router_barrier), policy);
        }
    }
    const int vectors = hs / 4;
    float4 scale[kTokenVectors], values[kTokenVectors];
#pragma unroll
    for (int j = 0; j < kTokenVectors; ++j) {
        const int at = int(threadIdx.x) + j * kTokenThreads;
        scale[j] = load_or_zero(reinterpret_cast<const float4 *>(args.norm_weight), at, vectors);
    }
    const int first_pair = int(int64_t(block) * (hs / 2) / grid); // of outputs
    const int own_pairs = int(int64_t(block + 1) * (hs / 2) / grid) - first_pair;
    const int first_hidden = 2 * int(int64_t(block) * (n_hidden / 2) / grid);
    const int own_hidden = 2 * int(int64_t(block + 1) * (n_hidden / 2) / grid) - first_hidden;
    grid_dependency_wait();
    auto *residual = static_cast<float *>(mlp.out.data);
#pragma unroll
    for (int j = 0; j < kTokenVectors; ++j) {
        const int at = int(threadIdx.x) + j * kTokenThreads;
        values[j] = load_or_zero(reinterpret_cast<const float4 *>(residual), at, vectors);
    }
    __syncthreads(); // router_barrier is initialized
    if (router_rows > 0) {
        mbarrier_wait_parity(smem_address(&router_barrier), 0);
    }
    auto *x = reinterpret_cast<float *>(shared + s.x_at);
    float squares = 0, dots[kTokenRouterRows] = {};
#pragma unroll
    for (int j = 0; j < kTokenVectors; ++j) {
        const int at = int(threadIdx.x) + j * kTokenThreads;
        if (at < vectors) {
            const float4 v = values[j], w = scale[j];
            const float4 scaled = make_float4(v.x * w.x, v.y * w.y, v.z * w.z, v.w * w.w);
            squares += sum_of_squares(v);
            reinterpret_cast<float4 *>(x)[(at & 1) * (hs / 8) + at / 2] = scaled;
#pragma unroll
            for (int r = 0; r < kTokenRouterRows; ++r) {
                if (r < router_rows) {
                    const uint2 bits = reinterpret_cast<const uint2 *>(shared)[r * vectors + at];
                    const float2 a = unpack_pair<T>(bits.x), b = unpack_pair<T>(bits.y);
                    dots[r] +=
                        (scaled.x * a.x + scaled.y * a.y) + (scaled.z * b.x + scaled.w * b.y);
                }
            }
        }
    }
    squares = warp_sum(squares);
#pragma unroll
    for (int r = 0; r < kTokenRouterRows; ++r) {
        if (r < router_rows) {
            dots[r] = warp_sum(dots[r]);
        }
    }
    if (lane == 0) {
#pragma unroll
        for (int r = 0; r < kTokenRouterRows; ++r) {
            partial[warp][r] = dots[r];
        }
        partial[warp][kTokenRouterRows] = squares;
    }
    __syncthreads();
    const auto sum_partial = [&](int column) {
        float sum = 0;
#pragma unroll
        for (int w = 0; w < kTokenWarps; ++w) {
            sum += partial[w][column];
        }
        return sum;
    };
    const float factor = 1.0f / sqrtf(sum_partial(kTokenRouterRows) / float(hs) + args.epsilon);
    if (int(threadIdx.x) < router_rows) {
        const int expert = block + int(threadIdx.x) * grid;
        float logit = sum_partial(int(threadIdx.x)) * factor;
        logit += args.router_bias.data != nullptr ? args.router_bias.load(expert) : 0.0f;
        st_relaxed_gpu(args.logits + expert, kTokenTag | __float_as_uint(logit));
    }
    if (args.normed != nullptr) {
        const int own = (vectors + grid - 1) / grid;
#pragma unroll
        for (int j = 0; j < kTokenVectors; ++j) {
            const int at = int(threadIdx.x) + j * kTokenThreads;
            if (at < vectors && at / own == block) {
                reinterpret_cast<uint2 *>(args.normed)[at] =
                    normed_pairs<T>(values[j], factor, scale[j]);
            }
        }
    }
    float before = 0; // of this thread's output
    if (int(threadIdx.x) < 2 * own_pairs) {
        before = residual[2 * first_pair + int(threadIdx.x)];
    }

    // -- Routing ----------------------------------------------------------------------------------
    if (warp == 0) {
#pragma unroll
        for (int i = 0; i < PerLane; ++i) {
            const int e = i * kWarpSize + lane;
            if (e < n_experts) {
                uint64_t word;
                do {
                    word = ld_relaxed_gpu(args.logits + e);
                } while (word < kTokenTag);
                route_logits[e] = __uint_as_float(uint32_t(word));
            }
        }
        __syncwarp();
        route_row<PerLane>(selected, weights, route_logits, args.bias, n_experts, top_k,
                           args.routing, route_scratch);
    }
    __syncthreads();

    // -- Pipeline ---------------------------------------------------------------------------------
    const auto units_of_warp = [&](int units) {
        return (max(0, units - warp) + kTokenWarps - 1) / kTokenWarps;
    };
    const int up_units = units_of_warp(own_hidden);
    const int all_units = up_units + units_of_warp(own_pairs * top_k);
    const uint32_t buffer_at = uint32_t(warp * s.stages) * s.stage_bytes;
    const uint64_t policy = l2_evict_first_policy();
    int fill_unit = 0, fill_block = 0, fill_stage = 0;
    const T *row = nullptr;
    const auto fill = [&] { // lane 0 copies the first row, lane 1 the second
        if (fill_unit == all_units) {
            return;
        }
        const bool is_down = fill_unit >= up_units;
        const int length = is_down ? di : hs;
        const int most = is_down ? s.down_block : s.up_block;
        if (fill_block == 0) {
            if (is_down) {
                const int unit = warp + (fill_unit - up_units) * kTokenWarps;
                const int pair = unit / top_k;
                const int64_t expert = selected[unit - pair * top_k];
                row = mlp.down + (expert * hs + 2 * (first_pair + pair) + (lane & 1)) * int64_t(di);
            } else {
                const int unit = first_hidden + warp + fill_unit * kTokenWarps;
                const int choice = unit / di;
                const int64_t at = int64_t(selected[choice]) * di + (unit - choice * di);
                row = ((lane & 1) != 0 ? mlp.up : mlp.gate) + at * hs;
            }
        }
        const int begin = fill_block * most;
        const uint32_t bytes = uint32_t(min(most, length - begin)) * 2;
        const uint32_t barrier = full + uint32_t(fill_stage) * 8;
        if (lane == 0) {
            mbarrier_arrive_expect_tx(barrier, 2 * bytes);
        }
        if (lane < 2) {
            cp_async_bulk(smem_address(shared) + buffer_at + uint32_t(fill_stage) * s.stage_bytes +
                              uint32_t(lane) * (s.stage_bytes / 2),
                          row + begin, bytes, barrier, policy);
        }
        fill_stage = fill_stage + 1 == s.stages ? 0 : fill_stage + 1;
        if (++fill_block == (is_down ? s.down_blocks : s.up_blocks)) {
            fill_block = 0;
            ++fill_unit;
        }
        if (fill_unit == all_units) {
            launch_dependents();
        }
    };
    for (int i = 0; i < s.stages; ++i) {
        fill();
    }
    if (all_units == 0) {
        launch_dependents();
    }
    int stage = 0;
    uint32_t parity = 0;
    // Sums of both rows of a unit with n_blocks stages; x: of n values, from value `first` on.
    const auto multiply = [&](const unsigned char *x_row, int n, int first, int length, int most,
                              int n_blocks) {
        float low[4] = {}, high[4] = {};
        for (int b = 0; b < n_blocks; ++b) {
            const int begin = b * most;
            const int chunks = min(most, length - begin) / 8;
            const auto *low_row = reinterpret_cast<const uint4 *>(shared + buffer_at +
                                                                  uint32_t(stage) * s.stage_bytes);
            const auto *high_row = low_row + s.stage_bytes / 32;
            mbarrier_wait_parity(full + uint32_t(stage) * 8, parity);
#pragma unroll 2
            for (int c = lane; c < chunks; c += kWarpSize) {
                const XVector v = load_x_vector<T, true>(x_row, (first + begin) / 8 + c, n);
                fma_vector<T>(low, low_row[c], v);
                fma_vector<T>(high, high_row[c], v);
            }
            __syncwarp();
            fill();
            if (++stage == s.stages) {
                stage = 0;
                parity ^= 1;
            }
        }
        return make_float2(warp_sum((low[0] + low[1]) + (low[2] + low[3])),
                           warp_sum((high[0] + high[1]) + (high[2] + high[3])));
    };

    // -- Gate and up ------------------------------------------------------------------------------
    T *own = reinterpret_cast<T *>(shared + s.own_at);
    for (int i = 0; i < up_units; ++i) {
        const int unit = warp + i * kTokenWarps;
        float2 sums = multiply(shared + s.x_at, hs, 0, hs, s.up_block, s.up_blocks);
        if (lane == 0) {
            const int choice = (first_hidden + unit) / di;
            const int64_t at = int64_t(selected[choice]) * di + (first_hidden + unit - choice * di);
            sums.x = sums.x * factor + (mlp.gate_bias.data != nullptr ? mlp.gate_bias.load(at) : 0);
            sums.y = sums.y * factor + (mlp.up_bias.data != nullptr ? mlp.up_bias.load(at) : 0);
            own[unit] = from_float<T>(moe_activation(sums.x, sums.y, mlp.limit, mlp.alpha));
        }
    }
    __syncthreads();
    for (int i = int(threadIdx.x); i < own_hidden / 2; i += kTokenThreads) {
        st_relaxed_gpu(args.hidden + first_hidden / 2 + i,
                       kTokenTag | reinterpret_cast<const uint32_t *>(own)[i]);
    }
    auto *hidden = reinterpret_cast<float *>(shared + s.hidden_at);
    constexpr int kAtOnce = 6;
    for (int first = int(threadIdx.x); first < n_hidden / 2; first += kAtOnce * kTokenThreads) {
        uint64_t words[kAtOnce] = {};
        bool is_complete = false;
        while (!is_complete) {
#pragma unroll
            for (int i = 0; i < kAtOnce; ++i) {
                if (words[i] < kTokenTag) {
                    words[i] = ld_relaxed_gpu(args.hidden +
                                              min(first + i * kTokenThreads, n_hidden / 2 - 1));
                }
            }
            is_complete = true;
#pragma unroll
            for (int i = 0; i < kAtOnce; ++i) {
                is_complete = is_complete && words[i] >= kTokenTag;
            }
        }
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
            const int at = 2 * (first + i * kTokenThreads);
            if (at < n_hidden) { // times the weight of the expert
                const float2 pair = unpack_pair<T>(uint32_t(words[i]));
                const float weight = weights[at / di];
                *reinterpret_cast<float2 *>(hidden + x_offset(at, n_hidden)) =
                    make_float2(pair.x * weight, pair.y * weight);
            }
        }
    }
    __syncthreads();
    uint32_t earlier = 0;
    if (threadIdx.x == 0) { // this block needs the words no more
        earlier = atomicAdd(args.readers, 1u);
    }

    // -- Down -------------------------------------------------------------------------------------
    auto *sums = reinterpret_cast<float2 *>(shared + s.sums_at); // [own_pairs, top_k]
    for (int unit = warp; unit < own_pairs * top_k; unit += kTokenWarps) {
        const int choice = unit % top_k;
        const float2 both =
            multiply(shared + s.hidden_at, n_hidden, choice * di, di, s.down_block, s.down_blocks);
        if (lane == 0) {
            sums[unit] = both;
        }
    }
    if (threadIdx.x == 0) {
        is_last = earlier == uint32_t(grid - 1);
    }
    __syncthreads();
    for (int i = int(threadIdx.x); i < 2 * own_pairs; i += kTokenThreads) {
        const int output = 2 * first_pair + i;
        float sum = 0;
        for (int j = 0; j < top_k; ++j) {
            const float2 both = sums[i / 2 * top_k + j];
            sum += i % 2 == 0 ? both.x : both.y;
        }
        for (int j = 0; j < top_k && mlp.down_bias.data != nullptr; ++j) {
            sum += weights[j] * mlp.down_bias.load(int64_t(selected[j]) * hs + output);
        }
        residual[output] = (i == int(threadIdx.x) ? before : residual[output]) + sum;
    }
    if (is_last) {
        for (int i = int(threadIdx.x); i < n_experts; i += kTokenThreads) {
            args.logits[i] = 0;
        }
        for (int i = int(threadIdx.x); i < n_hidden / 2; i += kTokenThreads) {
            args.hidden[i] = 0;
        }
        if (threadIdx.x == 0) {
            *args.readers = 0;
        }
    }
#endif
}

} // namespace llaisys::ops::cuda
