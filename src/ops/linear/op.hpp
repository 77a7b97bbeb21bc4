// Matrix products with weights that were laid out for the device once, at load.
// Contract: llaisysLinear in include/llaisys/ops.h.
#pragma once

#include "device/runtime.hpp"
#include "tensor/tensor.hpp"

namespace llaisys::ops {

struct LinearFormat;

// A weight [out_features, in_features] in the format that the device's kernels want. Cheap to copy
// (shares its bytes). Made once: the kernel family is chosen here, never by the number of rows.
struct LinearWeight {
    const LinearFormat *format = nullptr; // null: not defined()
    int64_t out_features = 0;
    int64_t in_features = 0;
    Tensor bytes;  // as the format lays them out
    Tensor scales; // not defined when the format has none

    // Lays `weight` ([out, in], row-major, of a dtype that the device has a format for) out anew,
    // in parallel on the stream. It may be a tensor of the host whatever the stream's device is.
    static LinearWeight pack(const device::Stream &stream, const Tensor &weight) {
        return pack(stream, weight, Tensor());
    }
    // Where lies_in_rows(stream) holds, the bytes go into `room`, dense [out, in] of the weight's
    // dtype, when that is defined: weights that lie one behind the other are one product.
    static LinearWeight pack(const device::Stream &stream, const Tensor &weight,
                             const Tensor &room);
    static bool lies_in_rows(const device::Stream &stream);
    // Bytes of the CPU's layout of a weight [out, in] of this dtype.
    static int64_t bytes_on_cpu(DType dtype, int64_t out_features, int64_t in_features);
    bool defined() const { return format != nullptr; }
};

// One product over the common input: out = in * weight^T + bias.
struct LinearPart {
    const LinearWeight *weight;
    const Tensor *bias; // null: none
    const Tensor *out;
};

// All parts in one parallel region. rows (i32) selects rows of `in`; null takes all.
void linear(const device::Stream &stream, const Tensor &in, const LinearPart *parts, int n_parts,
            const Tensor *rows = nullptr);

// out += in * weight^T + bias; out f32 [m, n], bias null: none. Not on the CPU, where a sum costs less
// in the pass that reads it (ops/decoder_layer).
void linear_add(const device::Stream &stream, const Tensor &out, const Tensor &in,
                const LinearWeight &weight, const Tensor *bias);

// Rows of a weight as they were before packing: out[i] = weight[index[i]]; index i64 [n], out [n, in]
// real. What an embedding needs when its table is the head's weight.
void linear_rows(const device::Stream &stream, const Tensor &out, const Tensor &index,
                 const LinearWeight &weight);

} // namespace llaisys::ops
