// How the weight of a product lies in a device's memory, and what runs on it: one row for each
// format of each device. A further format is a further row in the device's table.
#pragma once

#include "ops/linear/op.hpp"

namespace llaisys::ops {

struct LinearFormat {
    const char *name;
    DType dtype; // of the tensors that it is packed from

    // Fills bytes and scales of *packed from a weight [out_features, in_features] with dense rows.
    // A format that keeps rows as they are writes into bytes when they are defined already.
    void (*pack)(const device::Stream &stream, const Tensor &weight, LinearWeight *packed);
    // linear() over parts whose formats all have this function.
    void (*run)(const device::Stream &stream, const Tensor &in, const LinearPart *parts,
                int n_parts, const Tensor *rows);
    // linear_rows().
    void (*rows)(const device::Stream &stream, const Tensor &out, const Tensor &index,
                 const LinearWeight &weight);
};

// The table of a device.
struct LinearFormats {
    const LinearFormat *rows;
    int count;
};

} // namespace llaisys::ops
