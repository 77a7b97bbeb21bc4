// Weight formats: the layout of a weight in device memory and the functions that run on it, one row
// per format and device. A new format is a new row in the device's table.
#pragma once

#include "ops/linear/op.hpp"

namespace llaisys::ops {

// Layout of a weight that is stored by rows.
struct LinearRowLayout {
    DType dtype;
    int64_t row_elements; // of dtype
    bool has_scales;      // one f32 per row
};

struct LinearFormat {
    DType dtype; // of the tensors that are packed into it

    // Layout of this weight, whose values may decide; null: the format is not stored by rows.
    using RowLayout = LinearRowLayout(const Tensor &weight);
    RowLayout *row_layout;
    // Fill bytes and scales of *packed from a weight [out_features, in_features] with dense rows.
    // Both are allocated already when the format has row_layout.
    using Pack = void(const device::Stream &stream, const Tensor &weight, LinearWeight *packed);
    Pack *pack;
    // linear() over parts whose formats all have this function. Null: run_groups, as one group.
    using Run = void(const device::Stream &stream, const Tensor &in, const LinearPart *parts,
                     int n_parts, const Tensor *rows);
    Run *run;
    // linear_groups() over parts whose formats all have this function: parts [first_part,
    // first_part + n_parts) of every group. Null: not on this device.
    using RunGroups = void(const device::Stream &stream, const Tensor &in, const int32_t *rows,
                           const LinearGroup *groups, int64_t n_groups, int first_part,
                           int n_parts);
    RunGroups *run_groups;
    using Rows = decltype(linear_rows);
    Rows *rows;
    using Add = decltype(linear_add);
    Add *add = nullptr; // null: not on this device
    // Whether this machine has the kernels. Null: always; such a row follows the others of its dtype.
    bool (*is_available)() = nullptr;
};

// The format table of a device.
struct LinearFormats {
    const LinearFormat *rows;
    int count;
};

} // namespace llaisys::ops
