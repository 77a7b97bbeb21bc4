// The CPU side of linear. Arguments have been checked.
#pragma once

#include "ops/linear/op.hpp"

namespace llaisys::ops {

// weight [out, in] in panels [ceil(out / 32), in, 32]; see ops/cpu/kernels.hpp.
Tensor linear_pack_cpu(const device::Stream &stream, const Tensor &weight);

void linear_cpu(const device::Stream &stream, const Tensor &in, const LinearPart *parts,
                int n_parts, const Tensor *rows);

void linear_rows_cpu(const device::Stream &stream, const Tensor &out, const Tensor &index,
                     const LinearWeight &weight);

} // namespace llaisys::ops
