// The arithmetic of reductions on the CPU.
#pragma once

#include "base/dtype.hpp"
#include "parallel/reduce_op_type.hpp"

namespace llaisys::parallel {

const char *op_name(function::ReduceOpType op); // "sum", ...; "invalid" for an unknown value

bool is_reducible(DType dtype); // f32, f16, bf16, i32 or i64

// out[i] = in[0][i] op in[1][i] op ... in this order for every element, so that the bits depend on
// nothing but the values. 16-bit floats are combined in f32 and rounded once. `out` may be one of
// the inputs.
void reduce(void *out, const void *const *in, int n_inputs, int64_t count, DType dtype,
            function::ReduceOpType op);

} // namespace llaisys::parallel
