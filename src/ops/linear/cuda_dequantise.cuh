// Conversion of quantised weights (quant_rows.hpp) to 16 bits or f32. Bound: DRAM bandwidth.
#pragma once

#include "ops/cuda/dispatch.cuh"
#include "ops/cuda/quant_decode.cuh"

#include <algorithm>
#include <type_traits>

namespace llaisys::ops::cuda {

constexpr int kDequantiseThreads = 256;
constexpr int kDequantiseRows = 8; // per thread, loaded at once

// Codes of eight adjacent values.
template <QuantCodes Codes>
using QuantOctet = std::conditional_t<Codes == QuantCodes::int4, uint32_t, uint2>;

template <QuantCodes Codes>
__device__ __forceinline__ QuantBits<Codes> bits_of(const QuantOctet<Codes> &octet) {
    if constexpr (Codes == QuantCodes::int4) {
        return {make_uint2(octet, 0)};
    } else {
        return {make_uint4(octet.x, octet.y, 0, 0)};
    }
}

// Eight values of each row per thread, so that a warp stores adjacent vectors; a block has adjacent
// output rows. index null: the rows of w; otherwise rows of w by output row, zeros where the index
// is outside.
template <typename T, QuantCodes Codes>
__global__ void __launch_bounds__(kDequantiseThreads)
    dequantise_kernel(T *out, int64_t out_rows, QuantMatrix w, const int64_t *index, int64_t n_rows,
                      int group_shift, int k) {
    grid_dependency_wait();
    launch_dependents();
    const int at = int(blockIdx.x * kDequantiseThreads + threadIdx.x) * 8;
    if (at >= k) {
        return;
    }
    constexpr int kSegment = int(quant_segment(Codes));
    const int segment = at / kSegment;
    const int own = at - segment * kSegment;
    const int segment_at = segment * int(w.layout.segment_bytes(kSegment));
    const int codes_at = segment_at + int(w.layout.code_bytes(own));
    const int params_at =
        segment_at + int(w.layout.code_bytes(min(kSegment, k - segment * kSegment)));
    bool is_inside[kDequantiseRows];
    QuantOctet<Codes> octets[kDequantiseRows];
    QuantParams params[kDequantiseRows];
    float scales[kDequantiseRows];
    const int64_t first = int64_t(blockIdx.y) * kDequantiseRows;
#pragma unroll
    for (int i = 0; i < kDequantiseRows; ++i) {
        const int64_t to = first + i;
        const int64_t row = to >= out_rows ? -1 : index != nullptr ? index[to] : to;
        is_inside[i] = row >= 0 && row < n_rows;
        octets[i] = {};
        params[i] = {};
        scales[i] = 1;
        if (is_inside[i]) {
            const unsigned char *from = w.bytes + row * w.row_bytes;
            octets[i] = *reinterpret_cast<const QuantOctet<Codes> *>(from + codes_at);
            params[i] = load_params(from + params_at, own >> group_shift, w.layout.param_bytes);
            scales[i] = w.row_scale(row);
        }
    }
#pragma unroll
    for (int i = 0; i < kDequantiseRows; ++i) {
        if (first + i >= out_rows) {
            return;
        }
        T *to = out + (first + i) * k + at;
        // f16 lacks the range for the scales.
        if constexpr (Codes == QuantCodes::int4 && std::is_same_v<T, bf16>) {
            uint32_t pairs[8];
            const auto factor = Pair<T>::same(is_inside[i] ? 1 / kQuantFactor<T> : 0);
            decode_16<T, Codes>(bits_of<Codes>(octets[i]), params[i], pairs);
#pragma unroll
            for (int p = 0; p < 4; ++p) {
                pairs[p] = bits_of_pair(__hmul2(pair_of<T>(pairs[p]), factor));
            }
            *reinterpret_cast<uint4 *>(to) = make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
        } else {
            float values[16] = {};
            if (is_inside[i]) {
                decode_16_floats<Codes>(bits_of<Codes>(octets[i]), params[i], scales[i], values);
            }
            if constexpr (std::is_same_v<T, float>) {
                auto *vectors = reinterpret_cast<float4 *>(to);
                vectors[0] = make_float4(values[0], values[1], values[2], values[3]);
                vectors[1] = make_float4(values[4], values[5], values[6], values[7]);
            } else {
                *reinterpret_cast<uint4 *>(to) = make_uint4(
                    pack_pair<T>(values[0], values[1]), pack_pair<T>(values[2], values[3]),
                    pack_pair<T>(values[4], values[5]), pack_pair<T>(values[6], values[7]));
            }
        }
    }
}

// out [n, k] = the rows of w, or those of `index`.
template <typename T, QuantCodes Codes>
void dequantise_as(const device::CudaStream &stream, const Tensor &out, const QuantMatrix &w,
                   const int64_t *index, int64_t n_rows) {
    const int64_t k = out.size(1);
    constexpr int64_t kMaxRows = int64_t(65535) * kDequantiseRows; // of a grid
    for (int64_t first = 0; first < out.size(0); first += kMaxRows) {
        const int64_t rows = std::min(kMaxRows, out.size(0) - first);
        QuantMatrix part = w;
        if (index == nullptr) {
            part.bytes += first * w.row_bytes;
            part.row_scales += w.row_scales != nullptr ? first : 0;
        }
        const dim3 grid(ceil_div(k, kDequantiseThreads * 8), ceil_div(rows, kDequantiseRows));
        launch(stream, dequantise_kernel<T, Codes>, grid, kDequantiseThreads, 0, true,
               reinterpret_cast<T *>(out.data()) + first * k, rows, part,
               index != nullptr ? index + first : nullptr, index != nullptr ? n_rows : rows,
               group_shift(w.layout.group), int(k));
    }
}

inline void dequantise(const device::CudaStream &stream, const Tensor &out, const QuantMatrix &w,
                       const int64_t *index, int64_t n_rows) {
    const auto run = [&](auto type) {
        dispatch_codes(w.layout.codes, [&](auto codes) {
            dequantise_as<decltype(type), codes()>(stream, out, w, index, n_rows);
        });
    };
    if (out.dtype() == LLAISYS_DTYPE_F32) {
        run(float{});
    } else {
        dispatch_half(out.dtype(), run);
    }
}

} // namespace llaisys::ops::cuda
