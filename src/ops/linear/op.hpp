// Matrix products with weights that are packed for the device once, at load.
// Contract: llaisysLinear in include/llaisys/ops.h.
#pragma once

#include "device/runtime.hpp"
#include "tensor/tensor.hpp"

namespace llaisys::ops {

struct LinearFormat;

// Fused weight buffer: adjacent weights of products with the same input (q/k/v, gate/up), which run
// as one product. Only for formats that store weights by rows.
struct LinearBuffer {
    Tensor bytes, scales; // allocated with the first weight
    int64_t rows = 0;     // of all weights
};

// A weight [out_features, in_features] in a format of the device. Cheap to copy (shares its bytes).
// The kernel family is selected when it is packed, never by the number of rows.
struct LinearWeight {
    const LinearFormat *format = nullptr; // null: not defined()
    int64_t out_features = 0;
    int64_t in_features = 0;
    Tensor bytes;  // in the layout of the format
    Tensor scales; // undefined when the format has none

    // Pack `weight` ([out, in], row-major, of a dtype with a format on the device), in parallel on
    // the stream. It may be a host tensor whatever the stream's device is.
    static LinearWeight pack(const device::Stream &stream, const Tensor &weight) {
        return pack(stream, weight, nullptr, 0);
    }
    // The same into rows [first_row, ...) of the buffer, unless the buffer is null or has weights of
    // another layout.
    static LinearWeight pack(const device::Stream &stream, const Tensor &weight,
                             LinearBuffer *buffer, int64_t first_row);
    // Whether weights of the device are stored by rows.
    static bool lies_in_rows(const device::Stream &stream);
    // Packed bytes of a weight [out, in] of this dtype.
    static int64_t bytes_on(DeviceType device, DType dtype, int64_t out_features,
                            int64_t in_features);
    bool defined() const { return format != nullptr; }
    DType dtype() const; // of the tensor that was packed
};

// One product over the shared input: out = in * weight^T + bias.
struct LinearPart {
    const LinearWeight *weight;
    const Tensor *bias; // null: none
    const Tensor *out;
};

// All parts in one parallel region. rows (i32) selects rows of `in`; null: all rows.
void linear(const device::Stream &stream, const Tensor &in, const LinearPart *parts, int n_parts,
            const Tensor *rows = nullptr);

// Products of one range of rows with weights of its own: the tokens of one expert or of one head.
struct LinearGroup {
    int64_t first; // rows [first, first + count)
    int64_t count;
    const LinearPart *parts; // n_parts; bias is that of the group
    int64_t out_first = 0;   // the row of the group's outputs that is row 0 of `out`
};

// Grouped linear: for each group and part, out[r - out_first] = in[rows[r]] * weight^T + bias for the
// rows r of the group, in one parallel region; rows null: in[r]. The weights of part p have one
// format in all groups. A row's result depends on that row and its weight only. CPU.
void linear_groups(const device::Stream &stream, const Tensor &in, const int32_t *rows,
                   const LinearGroup *groups, int64_t n_groups, int n_parts);

// out += in * weight^T + bias; out f32 [m, n], bias null: none. Not on the CPU, where the pass that
// reads the sum adds it at lower cost (ops/decoder_layer).
void linear_add(const device::Stream &stream, const Tensor &out, const Tensor &in,
                const LinearWeight &weight, const Tensor *bias);

// Unpacked rows of a weight: out[i] = weight[index[i]]; index i64 [n], out [n, in] real. Used for
// embeddings whose table is the head's weight.
void linear_rows(const device::Stream &stream, const Tensor &out, const Tensor &index,
                 const LinearWeight &weight);

} // namespace llaisys::ops
