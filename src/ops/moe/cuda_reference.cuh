// Mixture of experts for weights of any dtype and activations of any real dtype and size; slow.
#pragma once

#include "ops/cuda/quant_decode.cuh"
#include "ops/moe/cuda_args.cuh"

namespace llaisys::ops::cuda {

constexpr int kMoeReferenceThreads = 256;

// Weight rows: real values, or quantised when the data of `values` is null.
struct MoeMatrix {
    Reals values;
    QuantMatrix quantised;
};

struct MoeReference {
    Reals x, hidden, out;
    MoeMatrix gate, up, down;
    Reals gate_bias, up_bias, down_bias;
    const int32_t *experts;
    const float *weights;
    int64_t ldx, ldo;
    int n, top_k, hs, di;
    bool adds;
    float limit, alpha;
};

// Values [at, at + 16) of a quantised row of n.
template <QuantCodes Codes>
__device__ void decode_row(const QuantMatrix &w, int64_t row, int at, int n, float (&values)[16]) {
    constexpr int kSegment = int(quant_segment(Codes));
    const int begin = at / kSegment * kSegment;
    const unsigned char *from =
        w.bytes + row * w.row_bytes + at / kSegment * w.layout.segment_bytes(kSegment);
    const auto bits =
        *reinterpret_cast<const QuantBits<Codes> *>(from + w.layout.code_bytes(at - begin));
    const unsigned char *params = from + w.layout.code_bytes(min(kSegment, n - begin));
    decode_16_floats<Codes>(
        bits, load_params(params, (at - begin) / w.layout.group, w.layout.param_bytes),
        w.row_scale(row), values);
}

// Dot product of row `row` of a matrix and values [at, at + n) of x.
__device__ float warp_dot(const MoeMatrix &matrix, int64_t row, const Reals &x, int64_t at, int n) {
    const int lane = threadIdx.x % kWarpSize;
    float sum = 0;
    if (matrix.values.data != nullptr) {
        for (int i = lane; i < n; i += kWarpSize) {
            sum += matrix.values.load(row * n + i) * x.load(at + i);
        }
        return warp_sum(sum);
    }
    const QuantMatrix &w = matrix.quantised;
    for (int i = lane * 16; i < n; i += kWarpSize * 16) {
        float values[16];
        switch (w.layout.codes) {
        case QuantCodes::int4:
            decode_row<QuantCodes::int4>(w, row, i, n, values);
            break;
        case QuantCodes::int8:
            decode_row<QuantCodes::int8>(w, row, i, n, values);
            break;
        case QuantCodes::f8:
            decode_row<QuantCodes::f8>(w, row, i, n, values);
            break;
        }
        for (int j = 0; j < 16; ++j) {
            sum += values[j] * x.load(at + i + j);
        }
    }
    return warp_sum(sum);
}

// One warp per output of a pair.
__global__ void reference_hidden_kernel(MoeReference args) {
    const int64_t item = (int64_t(blockIdx.x) * blockDim.x + threadIdx.x) / kWarpSize;
    if (item >= int64_t(args.n) * args.top_k * args.di) {
        return;
    }
    const int64_t pair = item / args.di;
    const int64_t row = int64_t(args.experts[pair]) * args.di + item % args.di;
    const int64_t x = pair / args.top_k * args.ldx;
    float gate = warp_dot(args.gate, row, args.x, x, args.hs);
    float up = warp_dot(args.up, row, args.x, x, args.hs);
    gate += args.gate_bias.data != nullptr ? args.gate_bias.load(row) : 0.0f;
    up += args.up_bias.data != nullptr ? args.up_bias.load(row) : 0.0f;
    if (threadIdx.x % kWarpSize == 0) {
        args.hidden.store(item, moe_activation(gate, up, args.limit, args.alpha));
    }
}

// One warp per output of a token.
__global__ void reference_out_kernel(MoeReference args) {
    const int64_t item = (int64_t(blockIdx.x) * blockDim.x + threadIdx.x) / kWarpSize;
    if (item >= int64_t(args.n) * args.hs) {
        return;
    }
    const int64_t token = item / args.hs;
    const int output = int(item % args.hs);
    float sum = 0;
    for (int j = 0; j < args.top_k; ++j) {
        const int64_t pair = token * args.top_k + j;
        const int64_t row = int64_t(args.experts[pair]) * args.hs + output;
        float value = warp_dot(args.down, row, args.hidden, pair * args.di, args.di);
        value += args.down_bias.data != nullptr ? args.down_bias.load(row) : 0.0f;
        sum += args.weights[pair] * value;
    }
    if (threadIdx.x % kWarpSize == 0) {
        const int64_t at = token * args.ldo + output;
        args.out.store(at, args.adds ? args.out.load(at) + sum : sum);
    }
}

inline void run_moe_reference(const device::CudaStream &stream, const MoeReference &args) {
    constexpr int kWarps = kMoeReferenceThreads / kWarpSize;
    const int64_t hidden = int64_t(args.n) * args.top_k * args.di;
    const int64_t outputs = int64_t(args.n) * args.hs;
    launch(stream, reference_hidden_kernel, ceil_div(hidden, kWarps), kMoeReferenceThreads, 0,
           false, args);
    launch(stream, reference_out_kernel, ceil_div(outputs, kWarps), kMoeReferenceThreads, 0, false,
           args);
}

} // namespace llaisys::ops::cuda
