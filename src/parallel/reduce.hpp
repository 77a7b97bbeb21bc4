// The arithmetic of reductions on the CPU.
#pragma once

#include "base/dtype.hpp"
#include "parallel/reduce_op_type.hpp"

namespace llaisys::parallel {

const char *reduce_op_name(function::ReduceOpType op); // "sum", ...; "invalid" for an unknown value

bool is_reducible(DType dtype); // f32, f16, bf16, i32 or i64

// out[i] = in[0][i] op in[1][i] op ... in this order for every element, so that the result depends
// on the values only. 16-bit floats accumulate in f32 and are rounded once. `out` may alias an
// input.
void reduce(void *out, const void *const *in, int n_inputs, int64_t count, DType dtype,
            function::ReduceOpType op);

} // namespace llaisys::parallel
