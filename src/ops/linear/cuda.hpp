// CUDA side of linear. Arguments have been checked.
#pragma once

#include "ops/linear/format.hpp"

namespace llaisys::ops {

// f32, f16 and bf16, row-major, and quantised rows (cuda_quantised.hpp); a weight may be packed from
// host memory.
LinearFormats linear_formats_cuda();

// The row of f32, f16 or bf16.
const LinearFormat &linear_format_cuda(DType dtype);

} // namespace llaisys::ops
