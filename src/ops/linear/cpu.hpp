// The formats of the CPU.
#pragma once

#include "ops/linear/format.hpp"

namespace llaisys::ops {

// f32, f16 and bf16, each as panels [ceil(out / 32), in, 32] of its own dtype (ops/cpu/kernels.hpp).
LinearFormats linear_formats_cpu();

} // namespace llaisys::ops
