// Matrix products with weights that were laid out for the device once, at load.
// Contract: llaisysLinear in include/llaisys/ops.h.
#pragma once

#include "device/runtime.hpp"
#include "tensor/tensor.hpp"

namespace llaisys::ops {

// A weight [out_features, in_features] in the layout that the device's kernels want. Cheap to copy
// (shares its bytes). Made once: the kernel family is chosen here, never by the number of rows.
class LinearWeight {
public:
    LinearWeight() = default; // defined() is false

    // Lays `weight` (real, [out, in], row-major) out anew, in parallel on the stream.
    static LinearWeight pack(const device::Stream &stream, const Tensor &weight);

    bool defined() const { return packed_.defined(); }
    int64_t out_features() const { return out_features_; }
    int64_t in_features() const { return in_features_; }
    DType dtype() const { return dtype_; }
    const Tensor &packed() const { return packed_; }

private:
    int64_t out_features_ = 0;
    int64_t in_features_ = 0;
    DType dtype_ = LLAISYS_DTYPE_INVALID;
    Tensor packed_;
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

// Rows of a weight as they were before packing: out[i] = weight[index[i]]; index i64 [n], out [n, in]
// real. What an embedding needs when its table is the head's weight.
void linear_rows(const device::Stream &stream, const Tensor &out, const Tensor &index,
                 const LinearWeight &weight);

} // namespace llaisys::ops
