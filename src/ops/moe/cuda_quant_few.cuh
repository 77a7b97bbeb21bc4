// Experts with quantised weights (ops/quant_rows.hpp), few tokens: no sorting. A lane loads 16
// adjacent codes of a weight row, converts them in registers and uses them as the A operand of
// mma.sync; the lanes of x load the same 16 values, so that the order of k within a step is the same
// on both sides. Bound: DRAM bandwidth.
//
//   moe_quant_few_gate_up_kernel  grid (di / 16, pairs), warps split k
//   moe_quant_few_down_kernel     grid (hs / 16, tokens), warps split experts and k
//
// gate and up have one layout; in, hidden and outputs are 16-bit values of T.
#pragma once

#include "ops/cuda/quant_decode.cuh"
#include "ops/moe/cuda_gemm.cuh"

namespace llaisys::ops::cuda {

// The experts' weights: rows [n_experts * di] of gate and up, [n_experts * hs] of down.
struct MoeQuantWeights {
    QuantMatrix gate, up, down;
};

constexpr int kMoeFewWarps = 8;
constexpr int kMoeFewThreads = kMoeFewWarps * kWarpSize;
constexpr int kMoeFewRows = 16; // outputs of a block

// Steps of k that are loaded ahead.
template <QuantCodes Codes> constexpr int kMoeQuantAhead = Codes == QuantCodes::int4 ? 3 : 2;

// Codes and parameters of 16 values in each of N rows.
template <QuantCodes Codes, int N> struct MoeCodes {
    QuantBits<Codes> bits[N];
    QuantParams params[N];
};

// Rows of one lane, N at a time.
template <QuantCodes Codes, int N> struct MoeRows {
    static constexpr int kSegment = int(quant_segment(Codes));
    const unsigned char *rows[N];
    QuantRowLayout layout;
    int64_t segment_bytes;
    int shift, k;

    __device__ __forceinline__ MoeRows(const QuantMatrix &w, int columns)
        : layout(w.layout), segment_bytes(w.layout.segment_bytes(kSegment)),
          shift(group_shift(w.layout.group)), k(columns) {}

    __device__ __forceinline__ static int code_bytes(int values) {
        return Codes == QuantCodes::int4 ? values / 2 : values;
    }

    // Values [64 tile + 16 t, + 16), t = lane % 4; zeros past the end of the rows.
    __device__ __forceinline__ void load(MoeCodes<Codes, N> &to, int tile) const {
        const int at = tile * kMoeTileK + int(threadIdx.x) % 4 * 16;
        const int segment = at / kSegment, own = at % kSegment;
        const int params = code_bytes(min(kSegment, k - segment * kSegment));
#pragma unroll
        for (int i = 0; i < N; ++i) {
            to.bits[i] = {};
            to.params[i] = {};
            if (at < k) {
                const unsigned char *from = rows[i] + segment * segment_bytes;
                to.bits[i] = *reinterpret_cast<const QuantBits<Codes> *>(from + code_bytes(own));
                to.params[i] = load_params(from + params, own >> shift, layout.param_bytes);
            }
        }
    }
};

// A operands of the four mma steps of 64 values: rows[0] are rows 0 to 7, rows[1] rows 8 to 15.
__device__ __forceinline__ void moe_operand(const uint32_t (&rows)[2][8], int step,
                                            uint32_t (&a)[4]) {
    a[0] = rows[0][2 * step];
    a[1] = rows[1][2 * step];
    a[2] = rows[0][2 * step + 1];
    a[3] = rows[1][2 * step + 1];
}

// Calls use(codes, tile) for tiles first, first + step, ... below end, with loads ahead.
template <QuantCodes Codes, int N, typename Use>
__device__ __forceinline__ void for_moe_tiles(const MoeRows<Codes, N> &rows, int first, int end,
                                              int step, const Use &use) {
    constexpr int kAhead = kMoeQuantAhead<Codes>;
    MoeCodes<Codes, N> ahead[kAhead];
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
        rows.load(ahead[i], first + i * step);
    }
    for (int tile = first; tile < end; tile += kAhead * step) {
#pragma unroll
        for (int i = 0; i < kAhead; ++i) {
            const int own = tile + i * step;
            if (own < end) {
                const MoeCodes<Codes, N> codes = ahead[i];
                rows.load(ahead[i], own + kAhead * step);
                use(codes, own);
            }
        }
    }
}

// What sums of row `row` are multiplied by.
template <typename T, QuantCodes Codes>
__device__ __forceinline__ float moe_row_factor(const QuantMatrix &w, int64_t row) {
    if constexpr (Codes == QuantCodes::int4) {
        return 1 / kQuantFactor<T>;
    } else {
        return Codes == QuantCodes::f8 ? w.row_scale(row) : 1.0f;
    }
}

// sums[i] += the products of 16 rows, rows 2 i and 2 i + 1 of the lane, with 64 values of one row
// of x. Only column 0 of the results is used: element 0 and 2 of the lanes with lane % 4 == 0.
template <typename T, QuantCodes Codes, int N>
__device__ __forceinline__ void moe_few_step(float (&sums)[N / 2][4],
                                             const MoeCodes<Codes, N> &codes, const T *x, int tile,
                                             int k) {
    const int lane = int(threadIdx.x) % kWarpSize;
    const int at = tile * kMoeTileK + lane % 4 * 16;
    uint4 x_values[2] = {};
    if (lane < 4 && at < k) {
        const auto *from = reinterpret_cast<const uint4 *>(x + at);
        x_values[0] = from[0];
        x_values[1] = from[1];
    }
    const uint32_t b[8] = {x_values[0].x, x_values[0].y, x_values[0].z, x_values[0].w,
                           x_values[1].x, x_values[1].y, x_values[1].z, x_values[1].w};
#pragma unroll
    for (int i = 0; i < N / 2; ++i) {
        uint32_t rows[2][8];
        decode_16<T, Codes>(codes.bits[2 * i], codes.params[2 * i], rows[0]);
        decode_16<T, Codes>(codes.bits[2 * i + 1], codes.params[2 * i + 1], rows[1]);
#pragma unroll
        for (int step = 0; step < kMoeTileK / 16; ++step) {
            uint32_t a[4];
            moe_operand(rows, step, a);
            // The columns of x are the lanes' lane / 4: column 0 is the row, the others are 0.
            mma_m16n8k16<T>(sums[i], a, b[2 * step], b[2 * step + 1]);
        }
    }
}

template <typename T, QuantCodes Codes>
__global__ void __launch_bounds__(kMoeFewThreads)
    moe_quant_few_gate_up_kernel(MoeArgs<T> args, MoeQuantWeights w) {
    __shared__ float partial[2][kMoeFewWarps][kMoeFewRows];
    launch_dependents();
    grid_dependency_wait();
    const int lane = int(threadIdx.x) % kWarpSize, warp = int(threadIdx.x) / kWarpSize;
    const int pair = int(blockIdx.y), first_out = int(blockIdx.x) * kMoeFewRows;
    const int64_t expert_row = int64_t(args.experts[pair]) * args.di;
    MoeRows<Codes, 4> rows(w.gate, args.hs); // gate, gate + 8, up, up + 8
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const int output = min(first_out + lane / 4 + i % 2 * 8, args.di - 1);
        rows.rows[i] =
            (i < 2 ? w.gate.bytes : w.up.bytes) + (expert_row + output) * w.gate.row_bytes;
    }
    const T *x = args.x + int64_t(pair / args.top_k) * args.ldx;
    float sums[2][4] = {};
    for_moe_tiles(rows, warp, (args.hs + kMoeTileK - 1) / kMoeTileK, kMoeFewWarps,
                  [&](const MoeCodes<Codes, 4> &codes, int tile) {
                      moe_few_step<T, Codes, 4>(sums, codes, x, tile, args.hs);
                  });
    if (lane % 4 == 0) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            partial[i][warp][lane / 4] = sums[i][0];
            partial[i][warp][lane / 4 + 8] = sums[i][2];
        }
    }
    __syncthreads();
    const int output = first_out + int(threadIdx.x);
    if (threadIdx.x < kMoeFewRows && output < args.di) {
        float gate = 0, up = 0;
        for (int i = 0; i < kMoeFewWarps; ++i) {
            gate += partial[0][i][threadIdx.x];
            up += partial[1][i][threadIdx.x];
        }
        const int64_t row = expert_row + output;
        gate *= moe_row_factor<T, Codes>(w.gate, row);
        up *= moe_row_factor<T, Codes>(w.up, row);
        gate += args.gate_bias.data != nullptr ? args.gate_bias.load(row) : 0.0f;
        up += args.up_bias.data != nullptr ? args.up_bias.load(row) : 0.0f;
        args.hidden[int64_t(pair) * args.di + output] =
            from_float<T>(moe_activation(gate, up, args.limit, args.alpha));
    }
}

template <typename T, QuantCodes Codes>
__global__ void __launch_bounds__(kMoeFewThreads)
    moe_quant_few_down_kernel(MoeArgs<T> args, MoeQuantWeights w) {
    __shared__ float partial[kMoeFewWarps][kMoeFewRows];
    launch_dependents();
    grid_dependency_wait();
    const int lane = int(threadIdx.x) % kWarpSize, warp = int(threadIdx.x) / kWarpSize;
    const int token = int(blockIdx.y), first_out = int(blockIdx.x) * kMoeFewRows;
    const int tiles = (args.di + kMoeTileK - 1) / kMoeTileK;
    // Each expert's k is split so that every warp has work.
    const int splits = max(1, kMoeFewWarps / args.top_k);
    float low = 0, high = 0; // outputs lane / 4 and lane / 4 + 8
    for (int item = warp; item < args.top_k * splits; item += kMoeFewWarps) {
        const int64_t pair = int64_t(token) * args.top_k + item / splits;
        const int64_t expert_row = int64_t(args.experts[pair]) * args.hs;
        MoeRows<Codes, 2> rows(w.down, args.di);
        int64_t at[2];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            at[i] = expert_row + min(first_out + lane / 4 + i * 8, args.hs - 1);
            rows.rows[i] = w.down.bytes + at[i] * w.down.row_bytes;
        }
        float sums[1][4] = {};
        for_moe_tiles(
            rows, item % splits, tiles, splits, [&](const MoeCodes<Codes, 2> &codes, int tile) {
                moe_few_step<T, Codes, 2>(sums, codes, args.hidden + pair * args.di, tile, args.di);
            });
        const float weight = args.weights[pair];
        low += weight * moe_row_factor<T, Codes>(w.down, at[0]) * sums[0][0];
        high += weight * moe_row_factor<T, Codes>(w.down, at[1]) * sums[0][2];
    }
    if (lane % 4 == 0) {
        partial[warp][lane / 4] = low;
        partial[warp][lane / 4 + 8] = high;
    }
    __syncthreads();
    const int output = first_out + int(threadIdx.x);
    if (threadIdx.x < kMoeFewRows && output < args.hs) {
        float sum = 0;
        for (int i = 0; i < kMoeFewWarps; ++i) {
            sum += partial[i][threadIdx.x];
        }
        for (int j = 0; j < args.top_k && args.down_bias.data != nullptr; ++j) {
            const int64_t pair = int64_t(token) * args.top_k + j;
            sum += args.weights[pair] *
                   args.down_bias.load(int64_t(args.experts[pair]) * args.hs + output);
        }
        const int64_t at = token * args.ldo + output;
        args.out.store(at, args.adds ? args.out.load(at) + sum : sum);
    }
}

template <typename T, QuantCodes Codes>
void moe_quant_few_gate_up(const device::CudaStream &stream, const MoeArgs<T> &args,
                           const MoeQuantWeights &w) {
    const dim3 grid(ceil_div(args.di, kMoeFewRows), unsigned(args.n * args.top_k));
    launch(stream, moe_quant_few_gate_up_kernel<T, Codes>, grid, kMoeFewThreads, 0, true, args, w);
}

template <typename T, QuantCodes Codes>
void moe_quant_few_down(const device::CudaStream &stream, const MoeArgs<T> &args,
                        const MoeQuantWeights &w) {
    const dim3 grid(ceil_div(args.hs, kMoeFewRows), unsigned(args.n));
    launch(stream, moe_quant_few_down_kernel<T, Codes>, grid, kMoeFewThreads, 0, true, args, w);
}

} // namespace llaisys::ops::cuda
