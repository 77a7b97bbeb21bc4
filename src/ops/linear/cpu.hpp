// Weight formats of the CPU.
#pragma once

#include "ops/linear/format.hpp"

namespace llaisys::ops {

// f32, f16 and bf16, each as panels [ceil(out / 32), in, 32] of its own dtype
// (ops/cpu/kernels.hpp), and the quantised ones (ops/cpu/quant_panels.hpp).
LinearFormats linear_formats_cpu();

// Bytes of the panels of a weight [out, in]; the dtype must have a format.
int64_t linear_bytes_cpu(DType dtype, int64_t out_features, int64_t in_features);

} // namespace llaisys::ops
