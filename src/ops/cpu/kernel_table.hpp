// Included by each kernels_<isa>.cpp: compiles every kernel for it and defines its table.
#pragma once

#include "device/cpu/simd.hpp"
#include "ops/cpu/attention_kernel.hpp"
#include "ops/cpu/kernels.hpp"
#include "ops/cpu/linear_kernel.hpp"
#include "ops/cpu/row_kernels.hpp"

namespace llaisys::LLAISYS_CPU_NS {

extern const ops::cpu::Kernels kernels;
const ops::cpu::Kernels kernels = {
    kIsa,
    convert_row<float, f16_t>,
    convert_row<float, bf16_t>,
    convert_row<f16_t, float>,
    convert_row<bf16_t, float>,
    add_rows,
    swiglu_row,
    scale_row,
    scale_in_place,
    sum_squares,
    max_of,
    exp_sum,
    find_equal,
    find_greater,
    angles,
    rotate,
    linear<float>,
    linear<f16_t>,
    linear<bf16_t>,
    attention_span,
    attention_merge,
};

} // namespace llaisys::LLAISYS_CPU_NS
